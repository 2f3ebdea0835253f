"""Options of the command line and their documentation, as generated from a dataclass of any kind."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click
from click.testing import CliRunner, Result

from maxsimd.api.flags import in_flags
from maxsimd.api.options import config_from, markdown_table, options_from
from maxsimd.engine.config import option


@dataclass(frozen=True, slots=True, kw_only=True)
class Baking:
    """A field of each kind that configurations have."""

    model: str | None = option(None, "Which oven.")
    recipe_name: str | None = option(None, "What to bake.")
    minutes: int = option(30, "How long.")
    most_crumbs: int = option(10_000, "How many crumbs are swept.")
    least_crumbs: int = option(9_999, "How many crumbs are left.")
    degrees: float = option(180.5, "How hot.")
    shape: Literal["round", "square"] = option("round", "Which tin.")
    topping: Literal["sugar", "salt"] | None = option(None, "What goes on top.")
    spice: tuple[str, ...] = option((), "What goes in; repeatable.")
    covered: bool = option(False, "Whether under a lid.")
    fan: bool = option(True, "Whether air moves.")

    def __post_init__(self) -> None:
        if self.minutes < 1:
            raise ValueError(f"minutes must be at least 1, not {self.minutes}")


@dataclass(frozen=True)
class Eating:
    model: str = option("fork", "Which cutlery.")
    guests: int | None = option(None, "Who comes.")


def _run(*arguments: str, exclude: frozenset[str] = frozenset({"model"})) -> tuple[Result, list[Any]]:
    """What a command with an argument `model` answers, and what it made of its options."""
    made: list[Any] = []

    @click.command()
    @click.argument("model", required=False)
    @options_from(Baking, exclude=exclude)
    @options_from(Eating, exclude=frozenset({"model"}))
    def bake(**values: Any) -> None:
        baking = config_from(Baking, values)
        made.extend((baking, dict(values), config_from(Eating, values), values))

    return CliRunner().invoke(bake, [*arguments], terminal_width=100), made


def test_a_value_becomes_what_its_field_is() -> None:
    for arguments, changed in (
        ([], {}),
        (["gas"], {"model": "gas"}),
        (["--recipe-name", "7"], {"recipe_name": "7"}),
        (["--minutes", "7"], {"minutes": 7}),
        (["--degrees", "7"], {"degrees": 7.0}),
        (["--shape", "square"], {"shape": "square"}),
        (["--topping", "salt"], {"topping": "salt"}),
        (["--spice", "anise", "--spice", "mace"], {"spice": ("anise", "mace")}),
        (["--covered"], {"covered": True}),
        (["--minutes", "7", "--covered", "gas"], {"minutes": 7, "covered": True, "model": "gas"}),
    ):
        result, made = _run(*arguments)
        assert result.exit_code == 0, result.output
        baking, left, eating, left_at_last = made
        assert dataclasses.asdict(baking) == dataclasses.asdict(Baking()) | changed
        assert list(map(type, dataclasses.astuple(baking))) == list(
            map(type, dataclasses.astuple(Baking(**changed)))
        )
        assert left == {"guests": None}, "the values of another configuration are left to it"
        assert (eating, left_at_last) == (Eating(), {})


def test_a_value_that_its_field_cannot_have_is_refused() -> None:
    for arguments, message in (
        (["--minutes", "soon"], "Invalid value for '--minutes': 'soon' is not a valid integer."),
        (["--guests", "all"], "Invalid value for '--guests': 'all' is not a valid integer."),
        (["--degrees", "hot"], "Invalid value for '--degrees': 'hot' is not a valid float."),
        (["--shape", "oval"], "Invalid value for '--shape': 'oval' is not one of 'round', 'square'."),
        (["--topping", "ham"], "Invalid value for '--topping': 'ham' is not one of 'sugar', 'salt'."),
        (["--covered=1"], "Option '--covered' does not take a value."),
        (["--recipe_name", "bread"], "No such option '--recipe_name'."),
        (["--model", "gas"], "No such option"),
        (["--minutes", "0"], "minutes must be at least 1, not 0"),
    ):
        result, made = _run(*arguments)
        assert result.exit_code == 2
        assert f"Error: {message}" in result.output
        assert made == []


def test_help_has_a_line_for_each_field_in_their_order() -> None:
    result, _ = _run("--help")
    lines = [" ".join(line.split()) for line in result.output.partition("Options:\n")[2].splitlines()]
    assert lines == [
        "--recipe-name TEXT What to bake.",
        "--minutes INTEGER How long. [default: 30]",
        "--most-crumbs INTEGER How many crumbs are swept. [default: 10000]",
        "--least-crumbs INTEGER How many crumbs are left. [default: 9999]",
        "--degrees FLOAT How hot. [default: 180.5]",
        "--shape [round|square] Which tin. [default: round]",
        "--topping [sugar|salt] What goes on top.",
        "--spice TEXT What goes in; repeatable.",
        "--covered Whether under a lid.",
        "--fan Whether air moves. [default: True]",
        "--guests INTEGER Who comes.",
        "--help Show this message and exit.",
    ]


def test_every_field_is_an_option_unless_it_is_excluded() -> None:
    @click.command()
    @options_from(Eating)
    def eat(**values: Any) -> None:
        click.echo(config_from(Eating, values))

    shown = CliRunner().invoke(eat, ["--model", "spoon", "--guests", "3"]).output
    assert shown == f"{Eating(model='spoon', guests=3)}\n"


def test_the_table_has_a_row_for_each_field_but_the_model() -> None:
    assert markdown_table(Baking, Eating).splitlines() == [
        "| option | default | meaning |",
        "| --- | --- | --- |",
        "| `--recipe-name` |  | What to bake. |",
        "| `--minutes` | 30 | How long. |",
        "| `--most-crumbs` | 10,000 | How many crumbs are swept. |",
        "| `--least-crumbs` | 9999 | How many crumbs are left. |",
        "| `--degrees` | 180.5 | How hot. |",
        "| `--shape` | round | Which tin. |",
        "| `--topping` |  | What goes on top. |",
        "| `--spice` |  | What goes in; repeatable. |",
        "| `--covered` | off | Whether under a lid. |",
        "| `--fan` | on | Whether air moves. |",
        "| `--guests` |  | Who comes. |",
    ]


ENGINE = Path(__file__).parents[3] / "engine"


def test_options_become_flags() -> None:
    for message, expected in (
        ("trust them with allow_pickle=True", "trust them with --allow-pickle"),
        ('try kernels="torch" or another dtype: 1e-3', "try --kernels torch or another dtype: 1e-3"),
        ("raise cache_mb, name a folder (cache_dir)", "raise --cache-mb, name a folder (--cache-dir)"),
        ("with max_model_len=512 there is none", "with --max-model-len 512 there is none"),
        ("dimensions=99 is more than 8", "--dimensions 99 is more than 8"),
        ("raise max_request_tokens", "raise --max-request-tokens"),
        # Not what only looks like one.
        ("max_request_tokens of the tenant 'a'", "max_request_tokens of the tenant 'a'"),
        ("no model of this device, in dtype float32", "no model of this device, in dtype float32"),
        ("/tmp/cache_dir/x is full", "/tmp/cache_dir/x is full"),
        ("my_cache_dir and cache_dirs", "my_cache_dir and cache_dirs"),
        ("window_overlap must be less", "window_overlap must be less"),
        ("models-device=1", "models-device=1"),
    ):
        assert in_flags(message) == expected


def test_the_engine_names_no_flags() -> None:
    """But those of other programs."""
    for path in sorted(ENGINE.rglob("*.py")):
        for line in path.read_text(encoding="utf-8").splitlines():
            code = line.partition("#")[0]
            for flag in re.findall(r"(?<!-)--[a-z][a-z-]+", code):
                assert flag in ("--no-deps", "--check", "--merge"), (
                    f"{path.relative_to(ENGINE)}: {line.strip()}"
                )
