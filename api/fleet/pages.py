"""The pages of /metrics that several processes have, as one: each sample says of which process it is."""

from collections.abc import Iterable


def joined(pages: Iterable[tuple[str, int, bytes]]) -> bytes:
    """Pages in Prometheus's text format, each with the name of a label and its value: `replica` and 0, say.
    Every family is described once."""
    described: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for label, value, page in pages:
        family = ""
        is_new = True
        for line in page.decode().split("\n"):
            if line.startswith("# "):
                name = line.split(" ", 3)[2]
                if name != family:
                    family, is_new = name, name not in described
                    samples.setdefault(name, [])
                if is_new:
                    described.setdefault(name, []).append(line)
            elif line:
                samples[family].append(_labelled(line, f'{label}="{value}"'))
    lines = [line for name in described for line in (*described[name], *samples[name])]
    return ("\n".join(lines) + "\n").encode()


def _labelled(sample: str, label: str) -> str:
    """A sample, which may have labels, with one more in front."""
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f"{name}{{{label},{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{label}}} {value}"
