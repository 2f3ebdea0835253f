"""The figures of a run as a Markdown report, and as JSON."""

from pathlib import Path
from typing import Any

from maxsimd.bench.peers.experiments import Outcome
from maxsimd.bench.peers.run import OURS, QUANTIZED, Results
from maxsimd.bench.report import lines_of, machine, write_json

_TITLES = {
    "cross-encoder": "Cross-encoder, MiniLM-L6 shape",
    "pairs": "Cross-encoder, MiniLM-L6 shape: 200 pairs in one request",
    "colbert": "ColBERT, BERT-base shape",
    "single": "Cross-encoder, MiniLM-L6 shape: one request of one document at a time",
    "documents": "Cross-encoder: documents a second by documents a request, 8 requests at a time",
    "load": "Cross-encoder: latency by requests at a time, 10 documents each",
    "cache": "Embedding cache, bfloat16: one request of 1,000 documents",
    "cache-int8": "Embedding cache, int8: the same",
    "prefix": "Causal reranker: 40% of the tokens shared by all pairs, run once or every time",
    "scaling": "Many clients, and requests of 10 to 10,000 documents",
    "ranking": "int8 on the embedded model: docstrings ranked",
}


def markdown(results: Results) -> str:
    """The whole report."""
    here = machine()
    limits = results.limits
    lines = [
        "# This server beside its peers",
        "",
        f"{here['processor']}, torch {here['torch']}, Python {here['python']}. Products at best: float32 "
        f"{limits['float32']:.0f} GFLOP/s, bfloat16 {limits['bfloat16']:.0f} GFLOP/s, int8 "
        f"{limits['int8']:.0f} GOP/s; copies {limits['copy']:.0f} GB/s. Medians over rounds, in which every "
        "system has its turn; ratios are taken round by round. The texts are docstrings, the weights random.",
    ]
    for name, outcomes in results.outcomes.items():
        lines += ["", f"## {_TITLES[name]}", ""]
        if name in results.products:
            lines += _throughput(outcomes[0], results, name)
        elif name == "single":
            lines += _latency(outcomes[0])
        else:
            lines += _curve(outcomes, name)
    if results.maxsim:
        lines += ["", "## MaxSim alone: 32 x 128 query, 1,000 documents of 20 to 340 tokens", ""]
        lines += _maxsim(results.maxsim)
    for name, figures in results.alone.items():
        lines += ["", f"## {_TITLES[name]}", "", "| | |", "| --- | ---: |"]
        lines += [f"| {shown} | {value} |" for shown, value in lines_of(figures)]
    return "\n".join(lines) + "\n"


def write(results: Results, folder: Path) -> list[Path]:
    """Writes peers-cpu.json and peers-cpu.md and returns their paths."""
    figures: dict[str, Any] = {
        name: [_as_json(outcome) for outcome in outcomes] for name, outcomes in results.outcomes.items()
    }
    report, data = folder / "peers-cpu.md", folder / "peers-cpu.json"
    report.write_text(markdown(results), encoding="utf-8")
    write_json(
        str(data),
        {"limits": results.limits, "products": results.products, "maxsim": results.maxsim}
        | figures
        | results.alone,
    )
    return [report, data]


def _throughput(outcome: Outcome, results: Results, name: str) -> list[str]:
    lines = [
        f"{outcome.documents} documents a request, {outcome.concurrency} requests at a time.",
        "",
        "| system | documents/s | tokens/s | share of its products' peak | maxsimd bfloat16 | maxsimd int8 |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    tokens_a_document = outcome.median(OURS, "tokens_per_s") / outcome.median(OURS, "documents_per_s")
    for system in outcome.turns:
        documents = outcome.median(system, "documents_per_s")
        # In-process peers do not say how many tokens they ran; they are given the same texts.
        tokens = outcome.median(system, "tokens_per_s") or documents * tokens_a_document
        share = tokens * results.products[name] / results.limits[system.split()[-1]]
        ratios = [f"{outcome.ratio(ours, system, 'documents_per_s'):.2f} x" for ours in (OURS, QUANTIZED)]
        lines.append(f"| {system} | {documents:.1f} | {tokens:,.0f} | {share:.0%} | {' | '.join(ratios)} |")
    return [*lines, *_by_tokens(outcome)]


def _by_tokens(outcome: Outcome) -> list[str]:
    """Servers that run other numbers of tokens for the same texts, by what they do a token."""
    ratios = [
        f"{ours} {outcome.ratio(ours, system, 'tokens_per_s'):.2f} times {system}"
        for system in outcome.turns
        for ours in (OURS, QUANTIZED)
        if system not in (OURS, QUANTIZED) and outcome.median(system, "tokens_per_s")
    ]
    return ["", f"By tokens instead of documents: {', '.join(ratios)}."] if ratios else []


def _latency(outcome: Outcome) -> list[str]:
    lines = ["| system | median ms | of it, maxsimd bfloat16 |", "| --- | ---: | ---: |"]
    for system in outcome.turns:
        ratio = outcome.ratio(OURS, system, "median_ms")
        lines.append(f"| {system} | {outcome.median(system, 'median_ms'):.1f} | {ratio:.2f} |")
    return lines


def _curve(outcomes: list[Outcome], name: str) -> list[str]:
    systems = list(outcomes[0].turns)
    unit = "documents" if name == "documents" else "at a time"
    lines = [f"| {unit} | {' | '.join(systems)} |", f"| ---: |{' ---: |' * len(systems)}"]
    for outcome in outcomes:
        if name == "documents":
            cells = [f"{outcome.median(system, 'documents_per_s'):.1f}/s" for system in systems]
        else:
            cells = [f"{outcome.median(system, 'median_ms'):.0f} ms" for system in systems]
        setting = outcome.documents if name == "documents" else outcome.concurrency
        lines.append(f"| {setting:,} | {' | '.join(cells)} |")
    return lines


def _maxsim(figures: dict[str, Any]) -> list[str]:
    lines = ["| contender | ms | largest error | times maxsim-cpu |", "| --- | ---: | ---: | ---: |"]
    for name, figure in figures["contenders"].items():
        ratio = figures["ratios"].get(name)
        shown = "" if ratio is None else f"{ratio:.2f}"
        lines.append(f"| {name} | {figure['ms']} | {figure['largest_error']:.0e} | {shown} |")
    return lines


def _as_json(outcome: Outcome) -> dict[str, Any]:
    what = ("documents_per_s", "tokens_per_s", "median_ms", "p99_ms")
    return {
        "documents": outcome.documents,
        "concurrency": outcome.concurrency,
        "rounds": len(next(iter(outcome.turns.values()))),
        "systems": {
            system: {name: round(outcome.median(system, name), 2) for name in what}
            for system in outcome.turns
        },
        "ratios_of_documents_per_s": {
            ours: {
                system: round(outcome.ratio(ours, system, "documents_per_s"), 2)
                for system in outcome.turns
                if system != ours
            }
            for ours in (OURS, QUANTIZED)
        },
    }
