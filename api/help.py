"""Help pages of commands: the usual options, those of a group, or all."""

import copy
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import click

from maxsimd.api.options import CollectionOption, GroupedOption, hints_of
from maxsimd.engine.config import COLLECTIONS, GROUPS

USUAL, ALL = "usual", "all"
# The appearance of a page, in rich-click's terms.
_STYLE: Mapping[str, Any] = {
    "theme": "default-slim",
    "append_metavars_help_string": "{}",
    "default_string": "\\[default: {}]",
    "envvar_string": "\\[env: {}]",
    "padding_epilog": (0, 0, 0, 0),
    "options_table_column_types": ["opt_all_metavar", "help"],
    "options_table_help_sections": ["help", "required", "default", "envvar"],
}


class Command(click.Command):
    """A command with help pages. The plain page shows the command's own options, and the usual ones of groups
    if it `shows_usual`. With `logs_hints` the command itself reports hints."""

    def __init__(self, *args: Any, shows_usual: bool = False, logs_hints: bool = False, **more: Any) -> None:
        super().__init__(*args, **more)
        self._shows_usual, self._logs_hints = shows_usual, logs_hints
        held = {each.group for each in self.params if isinstance(each, GroupedOption)}
        self._groups = [group for group in GROUPS if group in held]
        if self._groups:
            self.params.append(
                click.Option(
                    ["--help-all"],
                    is_flag=True,
                    is_eager=True,
                    expose_value=False,
                    callback=lambda context, _, is_asked: self._show(context, ALL if is_asked else None),
                    help="Show all options",
                )
            )

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        if self._help_option is None:
            takes_group: dict[str, Any] = {"is_flag": False, "flag_value": USUAL, "metavar": " "}
            self._help_option = click.Option(
                ["-h", "--help", "help_page"],
                is_eager=True,
                expose_value=False,
                callback=lambda context, _, page: self._show(context, page and str(page)),
                help="Show this page" + ("; --help=GROUP for a group" if self._groups else ""),
                **(takes_group if self._groups else {"is_flag": True, "flag_value": USUAL}),
            )
        return self._help_option

    def get_help(self, ctx: click.Context) -> str:
        return self.help_page(ctx, USUAL)

    def help_page(self, context: click.Context, page: str) -> str:
        more = ""
        if self._groups and page == USUAL:
            *names, last = self._groups
            more = f"More options: --help=GROUP for {', '.join(names)} or {last}; --help-all for all. "
            more += "MAXSIMD_DTYPE sets --dtype."
        return _drawn(self, context, self._sections(context, page), more)

    def invoke(self, ctx: click.Context) -> Any:
        for hint in () if self._logs_hints else hints_of(ctx):
            click.echo(hint, err=True)
        return super().invoke(ctx)

    def _show(self, context: click.Context, page: str | None) -> None:
        if page is None or context.resilient_parsing:
            return
        if page not in (USUAL, ALL, *self._groups):
            groups = ", ".join(self._groups)
            raise click.UsageError(f"there is no group {page!r}; the groups are {groups}", context)
        click.echo(self.help_page(context, page), color=context.color)
        context.exit()

    def _sections(self, context: click.Context, page: str) -> list[tuple[str, list[click.Option]]]:
        """Titles with options."""
        options = [each for each in self.get_params(context) if isinstance(each, click.Option)]
        grouped = [each for each in options if isinstance(each, GroupedOption)]
        grouped.sort(key=lambda each: isinstance(each, CollectionOption))
        own = [each for each in options if not isinstance(each, GroupedOption)]
        sections = []
        usual: list[click.Option] = []
        for group in self._groups:
            held = [each for each in grouped if each.group == group]
            usual += [_shown(each) for each in held if each.is_usual]
            if page in (group, ALL):
                shown = [_shown(each, with_variable=True) for each in held if not each.hidden]
                sections.append((GROUPS[group], shown))
            for name in [name for name, of in COLLECTIONS.items() if of == group == page]:
                keys = [_shown(each, as_key=True) for each in held if each.within == name]
                sections.append((f"Keys of --{name.replace('_', '-')}", keys))
        if page == USUAL:
            own = [each for each in own if each.name != "help_all"]
            sections.append(("Options", [*(usual if self._shows_usual else ()), *map(_shown, own)]))
        elif page == ALL:
            sections.append(("Other", [*map(_shown, own)]))
        return sections


class Commands(click.Group):
    """A group of commands with help pages."""

    command_class = Command

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        return ["-h", "--help"]

    def get_help(self, ctx: click.Context) -> str:
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        return _drawn(self, ctx, [("Options", [*map(_shown, options)])], commands=self.listed(ctx))

    def listed(self, context: click.Context) -> Sequence[str]:
        """The commands on the page."""
        return self.list_commands(context)


def _shown(option: click.Option, with_variable: bool = False, as_key: bool = False) -> click.Option:
    """A copy for a page."""
    shown = copy.copy(option)
    shown.show_envvar = with_variable
    if isinstance(shown.show_default, str):  # shown without parentheses
        shown.default, shown.show_default = shown.show_default, True
    if as_key:
        shown.opts, shown.hidden = [option.name or ""], False
    return shown


def _drawn(
    command: click.Command,
    context: click.Context,
    sections: Sequence[tuple[str, Sequence[click.Option]]],
    epilog: str = "",
    commands: Sequence[str] = (),
) -> str:
    """The page as text, as wide as the terminal."""
    from rich_click import RichCommand, RichContext, RichGroup  # late: it takes time
    from rich_click.rich_panel import RichCommandPanel, RichOptionPanel

    arguments = [each for each in command.params if isinstance(each, click.Argument)]
    options = [option for _, each in sections for option in each]
    panels: list[Any] = [
        RichOptionPanel(title, options=[each.name or "" for each in shown]) for title, shown in sections
    ]
    about: dict[str, Any] = {
        "name": command.name,
        "params": [*arguments, *options],
        "help": command.help,
        "epilog": epilog,
        "add_help_option": False,
    }
    page: Any
    if isinstance(command, click.Group):
        found = {name: each for name in commands if (each := command.get_command(context, name))}
        panels.append(RichCommandPanel("Commands", commands=list(commands)))
        page = RichGroup(commands=found, panels=panels, **about)
    else:
        page = RichCommand(panels=panels, **about)
    width = context.terminal_width or shutil.get_terminal_size().columns
    drawn = RichContext(
        page,
        info_name=context.info_name,
        parent=context.parent,
        rich_help_config={**_STYLE, "width": width, "max_width": width},
    )
    return "\n".join(line.rstrip() for line in page.get_help(drawn).splitlines()).rstrip()
