"""Hydra without a job: configs composed for checking, and whatever is wrong with them told in one helpful message."""

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from hydra import version
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_automatic_config_search_path
from hydra.conf import HydraConf
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

import grpo_cli.conf
from grpo_cli.config import GrpoRun, ScoreRun, SftRun
from grpo_cli.runtime import hydra_override

CONF = Path(grpo_cli.conf.__file__).parent

ConfigStore.instance().store("grpo_schema", GrpoRun)
ConfigStore.instance().store("sft_schema", SftRun)
ConfigStore.instance().store("score_schema", ScoreRun)
OmegaConf.register_new_resolver("sweep_name", lambda: "<name>", replace=True)  # the real one is set when the command is known


@dataclass(frozen=True)
class Command:
    script: str
    config: str
    schema: type
    about: str
    examples: list[str]
    """`command  # what it does`"""
    own_keys: str = ""


class Composer:
    """Hydra without a job: composes configs for checking, and turns what goes wrong into a ValueError that helps."""

    def __init__(self, command: Command, name: str | None, directory: str | Path | None, config_path: str | None = None):
        self.command, self.name = command, name or command.config
        search_path = create_automatic_config_search_path(None, __name__, config_path or "pkg://grpo_cli.conf")
        self.folders = [CONF]
        if directory is not None:
            folder = Path(directory).absolute()
            if not folder.is_dir():
                raise ValueError(f"-cd {directory}: there is no such folder")
            if name and (folder / f"{name}.yaml").exists() and (CONF / f"{name}.yaml").exists():
                raise ValueError(f"{directory}/{name}.yaml is hidden by the {name}.yaml of grpo-cli itself: give yours another name")
            search_path.prepend(provider="command-line", path=f"file://{folder}", anchor=SearchPathQuery(provider="schema"))
            self.folders.append(folder)
        self.search_path = search_path

    def __enter__(self) -> "Composer":
        version.setbase("1.3")
        self.hydra = Hydra.create_main_hydra2("cli", self.search_path)
        self.loader = self.hydra.config_loader
        return self

    def __exit__(self, *_) -> None:
        GlobalHydra.instance().clear()

    def _load(self, overrides: list[str], mode: RunMode) -> DictConfig:
        try:
            return self.hydra.compose_config(self.name, list(overrides), run_mode=mode, with_log_configuration=False)
        except (HydraException, OmegaConfBaseException, AssertionError, AttributeError, ValueError, yaml.YAMLError) as error:
            raise ValueError(self._explain(error, overrides)) from error

    def compose(self, overrides: list[str], number: int | None = None) -> DictConfig:
        """The config with its hydra node, its keys and types checked; number: as a job of a sweep."""
        cfg = self._load(overrides, RunMode.RUN)
        if OmegaConf.get_type(cfg) is not self.command.schema:
            raise ValueError(
                f"{self.name} is not a config of {self.command.script}: its defaults list must start from {self.command.config}: "
                f"try defaults: [{self.command.config}, _self_] in {self.name}.yaml"
            )
        if number is not None:
            with open_dict(cfg.hydra):
                cfg.hydra.job.num, cfg.hydra.job.id = number, str(number)
        HydraConfig.instance().set_config(cfg)
        values = OmegaConf.to_container(cfg, resolve=False)
        self._refuse_empty_mappings(cfg, overrides)
        _check_keys(values, self.command.schema, self.command.schema, overrides)
        values["hydra"].pop("env", None)  # Hydra's own, though its schema lacks it
        _check_keys(values["hydra"], HydraConf, self.command.schema, overrides, "hydra.")
        return cfg

    def _refuse_empty_mappings(self, cfg: DictConfig, overrides: list[str]) -> None:
        """KEY={} changes nothing where there is a mapping, since Hydra merges the two."""
        for override in self.parse(overrides):
            key = override.key_or_group
            kept = OmegaConf.select(cfg, key) if override.value() == {} and not override.is_add() else None
            if isinstance(kept, DictConfig) and len(kept):
                names, free = list(kept), _hint(self.command.schema, key) in (None, dict[str, Any])
                drop = f"drop entries one by one: try ~{key}.{names[-1]}" if free else f"try {key}.{names[0]}=VALUE"
                raise ValueError(f"{override.input_line} changes nothing, since a mapping is merged with what is there: {drop}")

    def parse(self, overrides: list[str]) -> list[Override]:
        try:
            return OverridesParser.create(config_loader=self.loader).parse_overrides(list(overrides))
        except (HydraException, ValueError) as error:
            raise ValueError(self._explain(error, overrides)) from error

    def jobs(self, overrides: list[str]) -> tuple[list[str], list[list[str]] | None]:
        """Overrides for Hydra itself, and those of each job as BasicSweeper will split them (None: another sweeper is at work)."""
        parsed = self.parse(overrides)
        for_hydra = [o.input_line for o in parsed if o.is_hydra_override()]
        sweeper = self._load(for_hydra, RunMode.MULTIRUN).hydra.sweeper
        if not sweeper._target_.endswith(".BasicSweeper"):
            return for_hydra + [o.input_line for o in parsed if not o.is_hydra_override() and not o.is_sweep_override()], None
        parsed = self.parse([f"{key}={value}" for key, value in (sweeper.params or {}).items()]) + parsed
        parsed = [o for o in parsed if not o.is_hydra_override()]
        for override in parsed:
            if override.is_delete():
                raise ValueError(f"{override.input_line}: a sweep cannot drop a key: put it into a recipe, or set a rule's weight to 0")
        advice = "list the values instead, such as kl.beta=0,0.04"
        try:
            jobs = BasicSweeper.split_arguments(parsed, None)[0]
        except (HydraException, ValueError) as error:
            raise ValueError(f"{error}: {advice}") from error
        if not jobs:
            empty = next(o.input_line for o in parsed if o.is_sweep_override() and not list(o.sweep_string_iterator()))
            raise ValueError(f"{empty} stands for no value at all, so the sweep has no job: {advice}")
        return for_hydra, jobs

    def refuse_groups(self, overrides: list[str], what: str) -> None:
        """A run's config.yaml holds values, not choices of groups."""
        for override in self.parse(overrides):
            if self.loader.repository.group_exists(override.key_or_group) and not isinstance(override.value(), dict):
                raise ValueError(
                    f"{override.input_line} cannot be changed here: {what} uses that run's own values: "
                    f"override single keys ({override.key_or_group}.KEY=VALUE), or start a new run"
                )

    def _explain(self, error: Exception, overrides: list[str]) -> str:
        cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
        if "raised while composing config" in str(error) and isinstance(error.__context__, OmegaConfBaseException):
            cause = error.__context__  # a mistake in a file
        first = _first_line(cause)
        if (adding := _adds_to_a_mapping(cause, overrides)) is not None:
            return adding
        if isinstance(cause, (ConfigKeyError, ConfigAttributeError)) and cause.full_key:
            siblings = list(cause.parent_node) if isinstance(cause.parent_node, DictConfig) else []
            return _unknown(cause.full_key, siblings, self.command.schema, overrides)
        if isinstance(cause, ValidationError) and cause.full_key:
            key = re.sub(r"\[\d+\]$", "", cause.full_key)  # a list's own type says what its items are
            return f"{_given(key, overrides) or key}: {first}: {_expected(key, _hint(self.command.schema, key))}"
        if isinstance(error, yaml.YAMLError):
            return f"a config file cannot be read: {' '.join(str(error).split())}"
        if "does not support deletion" in first and (deleted := re.search(r"override (~([^\s:=]+)[^\s:]*)", str(error))):
            line, key = deleted.groups()
            nullable = type(None) in get_args(_hint(self.command.schema, key))
            return f"{key} cannot be left out: drop {line}" + (f", or try {key}=null" if nullable else f", or try {key}=VALUE")
        if isinstance(error, OverrideParseException):
            key, _, value = error.override.partition("=")
            if key != key.strip():
                return f"cannot read the override {error.override}: write it without blanks around the =: try {key.strip()}={value.strip()}"
            if re.match(r"""(?!\w+\()[^\[{'"]""", value):  # one text, neither list nor mapping nor function nor in quotes
                return f"cannot read the override {error.override}: put the value in quotes: try {hydra_override(key, value)}"
            return (
                f"cannot read the override {error.override}: {first}: "
                "write key=value without blanks, and quote brackets and blanks for the shell, such as 'data.digits=[2,3]'"
            )
        if isinstance(error, MissingConfigException):
            return self._missing_config(error, overrides)
        if isinstance(error, (AssertionError, AttributeError)) and cause is error:
            return _null_section(error, self.command.schema, overrides)
        if "Ambiguous value" in first:
            line = first.split("'")[1]
            one = hydra_override(*line.split("=", 1))
            if self.command.schema is GrpoRun and self.command.script != "grpo-train":
                return f"{line} is a list of values, and {self.command.script} shows one run: give one value, or one text as {one}"
            return f"{line} is a list of values to sweep over: add -m to run each of them, or write a list as key=[a,b], one text as {one}"
        if repeated := re.match(r"Multiple values for ([\w/@]+)\. To override a value use 'override", first):
            group = repeated.group(1)
            return f"{_given(group, overrides) or group}: the group {group} has its option already: drop the +"
        if "An item is already at" in first:
            return f"{first.split(chr(39))[1]} exists already: drop the +"
        if "must be a string or a list" in first:
            for override in self.parse(overrides):
                group = override.key_or_group
                if group and self.loader.repository.group_exists(group) and not isinstance(override.value(), str):
                    return f"{override.input_line}: a group takes the name of an option: {self._options(group)}"
        return f"{_first_line(error)}: {first}" if cause is not error else first

    def _options(self, group: str, wanted: str = "") -> str:
        options = sorted((o for o in self.loader.get_group_options(group) if not o.startswith("_")), key=lambda o: (len(o), o))
        near = difflib.get_close_matches(wanted, options, 1)
        if wanted[1:].isdigit():  # g3 lies between g2 and g4, though g32 is spelt more like it
            near = sorted((o for o in options if o[1:].isdigit()), key=lambda o: abs(int(o[1:]) - int(wanted[1:])))[:2]
        return f"{group} has {', '.join(options)}: try {' or '.join(f'{group}={o}' for o in near or options[:1])}"

    def _missing_config(self, error: MissingConfigException, overrides: list[str]) -> str:
        missing = error.missing_cfg_file or ""
        group, _, option = missing.rpartition("/")
        if missing != self.name and group and self.loader.repository.group_exists(group):
            return f"{_given(group, overrides) or missing}: there is no option {option}: {self._options(group, option)}"
        if missing != self.name:
            return " ".join(str(error).split("Config search path:")[0].split())
        names = sorted({path.stem for folder in self.folders for path in folder.glob("*.yaml") if not path.stem.startswith("_")})
        near = difflib.get_close_matches(self.name, names, 1) or [self.command.config]
        where = ", ".join(dict.fromkeys(map(str, self.folders)))
        listed = ", ".join(names)
        return f"there is no config {self.name} in {where} (there are: {listed}): try -cn {near[0]}, or name its folder with -cd FOLDER"


def convert(cfg: DictConfig, overrides: list[str]) -> GrpoRun | SftRun | ScoreRun:
    """The config as plain dataclasses, all checks done."""
    cfg = cfg.copy()
    with open_dict(cfg):
        cfg.pop("hydra", None)
    try:
        missing = sorted(OmegaConf.missing_keys(cfg))
        for key in missing:
            if _hint(OmegaConf.get_type(cfg), key) is str:
                OmegaConf.update(cfg, key, "")  # the section's own check says best what an empty text should be
        if not missing or not OmegaConf.missing_keys(cfg):
            run = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        key = error.full_key or ""
        raise ValueError(f"{_given(key, overrides) or key}: {_first_line(error)}") from error
    if missing:
        options = sorted(path.stem for path in (CONF / missing[0]).glob("[!_]*.yaml"))
        raise ValueError(f"{missing[0]} is not set: try {missing[0]}={options[0] if options else 'VALUE'}")
    return run


def given_value(key: str, overrides: list[str]) -> Any:
    """The value of the last key=VALUE among the overrides, read as Hydra reads it; None when there is none."""
    lines = [line for line in overrides if line.lstrip("+").startswith(f"{key}=")]
    try:
        return OverridesParser.create().parse_overrides(lines[-1:])[0].value() if lines else None
    except HydraException:
        return None  # composing tells what is wrong with it


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _check_keys(values: dict, schema: type, root: type, overrides: list[str], prefix: str = "") -> None:
    """Refuse keys that the schema lacks (Hydra takes them behind a +, omegaconf then drops them) and sections that were deleted."""
    hints = get_type_hints(schema)
    for key, value in values.items():
        if key not in hints and prefix + key != "hydra":
            raise ValueError(_unknown(prefix + key, list(hints), root, overrides))
        inner = _dataclass_of(hints.get(key))
        if inner and isinstance(value, dict):
            _check_keys(value, inner, root, overrides, f"{prefix}{key}.")
    for key in hints:
        if key not in values and schema is not HydraConf:
            raise ValueError(f"{prefix}{key} cannot be left out: drop ~{prefix}{key}")


def _keys(schema: type, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a schema."""
    for name, hint in get_type_hints(schema).items():
        yield prefix + name
        if inner := _dataclass_of(hint):
            yield from _keys(inner, f"{prefix}{name}.")


def _dataclass_of(hint: Any) -> type | None:
    """X for X and Optional[X] when X is a dataclass."""
    return next((t for t in (hint, *get_args(hint)) if is_dataclass(t)), None) if get_origin(hint) in (None, Union) else None


def _given(key: str, overrides: list[str]) -> str | None:
    """The override of this key or of one below it, without its +."""
    lines = [line.lstrip("+~") for line in overrides]
    return next((line for line in reversed(lines) if line.startswith((f"{key}=", f"{key}."))), None)


def _unknown(key: str, siblings: list[str], schema: type, overrides: list[str]) -> str:
    """Names beside it come first, then the same name elsewhere: beta is kl.beta."""
    parent, _, leaf = key.rpartition(".")
    beside = {name: f"{parent}.{name}" if parent else name for name in siblings if name != "hydra"}
    near = [beside[name] for name in difflib.get_close_matches(leaf, beside, 2, 0.6)]
    near = near or [name for name in _keys(schema) if difflib.SequenceMatcher(None, name.rpartition(".")[2], leaf).ratio() > 0.85][:3]
    line = _given(key, overrides)
    if not near:
        return f"{line or key} is unknown: {parent or 'a run'} has {', '.join(beside)}"
    others = f" (or {', '.join(near[1:])})" if near[1:] else ""
    return f"{key} is unknown: did you mean {near[0]}{others}? Try {near[0]}{line[len(key) :] if line else '=VALUE'}"


def _hint(schema: type, key: str) -> Any:
    """The type of a dotted key, None outside the schema."""
    first, _, rest = key.partition(".")
    hint = get_type_hints(schema).get(first)
    return hint if not rest else _hint(_dataclass_of(hint), rest) if _dataclass_of(hint) else None


LIST_EXAMPLES = {
    "data.digits": "[2,3]",
    "demos.digits": "[2,3]",
    "data.difficulty": "[0.2,0.8]",
    "optimizer.betas": "[0.9,0.95]",
    "evaluation.pass_at": "[1]",
    "tracker.tags": "[first,second]",
}


def _expected(key: str, hint: Any) -> str:
    """What to type instead of a value of the wrong type."""
    hint = next((t for t in get_args(hint) if get_origin(t) is list), hint)
    kind = (
        next((t for t in (hint, *get_args(hint)) if isinstance(t, type)), None) if get_origin(hint) in (None, Union) else get_origin(hint)
    )
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"try {key}={next(iter(kind)).name}"
    words = {float: ("a number", "0.1"), int: ("a whole number", "1"), bool: ("true or false", "true"), list: ("a list", "[2,3]")}
    if kind in words:
        what, example = words[kind]
        example = LIST_EXAMPLES.get(key, "[]") if kind is list else example
        return f"{what} is expected: try {key}={example}" if kind is not list else f"{what} is expected: try '{key}={example}'"
    if is_dataclass(kind):
        return f"{key} is a section: try {key}.{fields(kind)[0].name}=VALUE"
    return f"drop it, or try {key}={'TEXT' if kind is str else 'VALUE'}"


def _null_section(error: Exception, schema: type, overrides: list[str]) -> str:
    """An override of, or in, a section that is null, such as model.lora: omegaconf fails on it without a word of sense."""
    named = re.search(r"full_key: (\S+)", str(error))
    nullable = [key for key in _keys(schema) if type(None) in get_args(_hint(schema, key)) and _dataclass_of(_hint(schema, key))]
    section = named.group(1) if named else next((key for key in nullable if _given(key, overrides)), "a section")
    drop = f"drop {section}=null, or " if f"{section}=null" in overrides else ""
    return (
        f"{_given(section, overrides)}: {section} is null here, and a null section cannot be filled from the command line: "
        f"{drop}write the whole section into a config of your own (-cd FOLDER -cn NAME)"
    )


def _adds_to_a_mapping(cause: Exception, overrides: list[str]) -> str | None:
    """The message when a rule's own key, an argument or a new rule was meant to be added: Hydra wants a + for it."""
    key = getattr(cause, "full_key", None) or ""
    if not key or not isinstance(cause, (ConfigKeyError, ConfigAttributeError)):
        return None
    addable = re.compile(r"reward\.rules\.[^.=]+\.(kind=|args\.|fn=)")
    line = next((o for o in reversed(overrides) if addable.match(o) and o.startswith((f"{key}=", f"{key}."))), None)
    if line is None:
        return None
    return f"{line}: there is no {key} to change, and adding needs a +: try +{line}"
