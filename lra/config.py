"""The configuration of a run: typed, validated as a whole, resolved, hashed.

Values live in ``conf/``; the dataclasses here and beside each mixer and task say what they mean.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import attention
import lra.tasks
from attention.base import MixerConfig
from attention.kernels import available
from lra.errors import UserError
from lra.paths import absolute
from lra.protocol import TrainerConfig
from lra.regimes import regime_of
from lra.suggest import nearest, unknown_key
from lra.tasks.base import TaskConfig
from models.encoder import Encoder, EncoderConfig, matched_ffn_width, not_kept

ROOT = Path(__file__).resolve().parent.parent
HYDRA_VERSION_BASE = "1.3"
RESUME = ("auto", "never")
TRACKING_MODES = ("auto", "online", "offline", "disabled")


def conf_dir() -> Path:
    """``conf/`` inside the installed package if it was shipped there, else beside the sources."""
    packaged = Path(__file__).resolve().parent / "conf"
    return packaged if packaged.is_dir() else ROOT / "conf"


@dataclass
class TrackingConfig:
    """Where a run is mirrored; the run directory itself is always written."""

    mode: str = "auto"
    """``auto``: W&B online if a key is there and the server answers, else offline. Or online, offline, disabled."""
    project: str = "lra"
    entity: str | None = None


@dataclass
class RunConfig:
    """One run."""

    attention: MixerConfig = field(default_factory=MixerConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    model: EncoderConfig = field(default_factory=EncoderConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    seed: int = 0
    device: str = "auto"
    resume: str = "auto"
    """``auto``: go on where an unfinished run of this configuration stands. ``never``: start anew."""
    data_dir: str = "data"
    runs_dir: str = "results/runs"

    def validate(self) -> None:
        """Check what no single dataclass can see; ``UserError`` names the key."""
        try:
            self.model.validate()
            self.trainer.validate()
            mixer = attention.load(self.attention.name)
            if type(self.attention) is not mixer.Config:
                raise ValueError(
                    f"attention.name={self.attention.name} does not fit the other options of attention; "
                    f"choose the backend with attention={self.attention.name}"
                )
            if not (mixer.causal if self.attention.causal else mixer.bidirectional):
                raise ValueError(f"attention={self.attention.name} has no form for causal={self.attention.causal}")
            kernels = ("auto", *available(mixer.op, self.device))
            if self.attention.kernel not in kernels:
                raise ValueError(
                    f"attention.kernel={self.attention.kernel} is unknown for attention={self.attention.name} on "
                    f"{self.device}; choose {' | '.join(kernels)}"
                )
            # building one block runs every check that the encoder and the mixer make themselves
            with not_kept(self.model):
                Encoder(replace(self.model, num_layers=1), self.attention, vocab_size=2, length=1)
            task = lra.tasks.load(self.task.name)
        except ValueError as error:
            raise UserError(str(error)) from None
        for key in ("data_dir", "runs_dir"):
            if not getattr(self, key):
                raise UserError(f"{key}= is empty; name a folder, or leave it out for the default")
        if self.tracking.mode not in TRACKING_MODES:
            raise UserError(f"tracking.mode={self.tracking.mode!r} is unknown; choose {' | '.join(TRACKING_MODES)}")
        if self.resume not in RESUME:
            raise UserError(f"resume={self.resume!r} is unknown; choose {' | '.join(RESUME)}")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed={self.seed} is out of range; give 0 ... 2**32 - 1")
        if type(self.task) is not task.Config:
            raise UserError(
                f"task.name={self.task.name} does not fit the other options of task; use task={self.task.name}"
            )
        task.check(self.task)

    def fingerprint(self, *, without: tuple[str, ...] = ()) -> str:
        """Hash of the fields that change numbers, less ``without``."""
        values = asdict(self)
        for key in ("tracking", "resume", "data_dir", "runs_dir", *without):
            del values[key]
        del values["trainer"]["log_every"]
        return _hash(values)

    def protocol_fingerprint(self) -> str:
        """The same without attention and seed: runs that share it may be compared.

        Nor does it hold what the protocol lets every mixer have for itself: a rate chosen among those tried, an
        FFN width that makes parameters equal.
        """
        shared = replace(self, model=replace(self.model), trainer=replace(self.trainer))
        if shared.trainer.lr_tried:
            shared.trainer.lr = 0.0
        if shared.model.match:
            shared.model.ffn_width = 0
        return shared.fingerprint(without=("attention", "seed"))

    def mixer_fingerprint(self) -> str:
        """Hash of the mixer's options: runs that share it are seeds of one backend."""
        values = {k: v for k, v in asdict(self.attention).items() if not k.endswith("seed")}
        return _hash(values)

    @property
    def run_id(self) -> str:
        """Readable and unique: ``task-length-attention-seed-hash``."""
        return f"{self.task.name}-{self.task.length}-{self.attention.name}-s{self.seed}-{self.fingerprint()[:8]}"

    @property
    def run_dir(self) -> Path:
        return Path(self.runs_dir) / self.run_id

    @property
    def regime(self) -> str:
        return regime_of(self.task.length)

    def yaml(self) -> str:
        """The resolved configuration as YAML, without interpolations."""
        return OmegaConf.to_yaml(OmegaConf.structured(self))


def _hash(values: dict) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:10]


@cache
def register() -> None:
    """Put the schemas of the run, of every mixer and of every task into Hydra's ConfigStore."""
    store = ConfigStore.instance()
    store.store(name="config_schema", node=RunConfig)
    for name in attention.REGISTRY:
        store.store(group="attention", name=f"{name}_schema", node=attention.load(name).Config)
    for name in lra.tasks.REGISTRY:
        store.store(group="task", name=f"{name}_schema", node=lra.tasks.load(name).Config)


def resolve(config: DictConfig) -> RunConfig:
    """Typed, validated configuration with every ``auto`` that changes numbers replaced by what it means here."""
    try:
        run: RunConfig = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise UserError(describe(error, [])) from None
    if extra := list(_extra_keys(run)):
        raise UserError(f"{', '.join(extra)}: there is no such key, and nothing would read it; leave out the +")
    # Hydra's -m may change directories between runs: from here on paths no longer depend on the caller's
    for key in ("data_dir", "runs_dir"):
        if getattr(run, key):
            setattr(run, key, str(absolute(getattr(run, key), key)))
    run.device = _device(run.device)
    if (task := _task_class(run.task)) and type(run.task) is task.Config:
        run.task = task.resolved(run.task, Path(run.data_dir))
    if run.trainer.precision == "auto":
        has_bf16 = run.device.startswith("cuda") and torch.cuda.is_bf16_supported()
        run.trainer.precision = "bf16" if has_bf16 else "fp32"
    run.validate()
    if run.model.match:
        try:
            run.model.ffn_width = matched_ffn_width(run.model, run.attention)
        except ValueError as error:
            raise UserError(str(error)) from None
    return run


def _extra_keys(node: object, prefix: str = "") -> Iterator[str]:
    """What a ``+key=value`` put beside the declared fields."""
    declared = {f.name for f in fields(node)}
    for name, value in vars(node).items():
        if name not in declared:
            yield prefix + name
        elif is_dataclass(value):
            yield from _extra_keys(value, f"{prefix}{name}.")


def _task_class(config: TaskConfig) -> type[lra.tasks.Task] | None:
    """The task's class; None for a name that ``RunConfig.validate`` refuses."""
    return lra.tasks.load(config.name) if config.name in lra.tasks.REGISTRY else None


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda") or kind == "cpu" and name != "cpu":
        raise UserError(f"device={name!r} is unknown; choose auto | cpu | cuda | cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device={name} was asked for, but torch sees no CUDA device; use device=cpu or device=auto")
    return name


def from_yaml(path: Path, overrides: list[str]) -> tuple[RunConfig, RunConfig]:
    """The configuration that a run left in ``path``, and the same with ``key=value`` overrides."""
    for override in overrides:
        key, sign, _ = override.partition("=")
        if not sign or key in ("attention", "task", "model", "trainer", "experiment", "regime"):
            raise UserError(
                f"{override}: a resumed run takes key=value of single options, such as trainer.lr=0.001; for another "
                f"backend, task or preset start a run with `lra train`"
            )
    tree = OmegaConf.structured(RunConfig)
    try:
        saved = OmegaConf.load(path)
        lacking = [key for key in ("attention", "task") if not OmegaConf.is_dict(saved) or key not in saved]
        if lacking:
            found = (
                ("nothing" if not saved else f"no {' and no '.join(lacking)}") if OmegaConf.is_dict(saved) else "a list"
            )
            raise UserError(f"{path}: expected the keys of a run, found {found}; restore it, or start anew")
        for group, module in (("attention", attention), ("task", lra.tasks)):
            tree[group] = OmegaConf.structured(module.load(saved[group].name).Config)
        before = OmegaConf.merge(tree, saved)
        after = OmegaConf.merge(before, OmegaConf.from_dotlist(overrides))
    except OSError as error:
        # OmegaConf calls a single number so
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); name the directory of a run") from None
    except COMPOSITION_ERRORS as error:
        culprit = _culprit(str(error), overrides)
        text = describe(error, overrides, tree)
        raise UserError(text if culprit else f"{path}: {text}") from None
    except (AttributeError, TypeError, KeyError, UnicodeDecodeError, YAMLError):
        raise UserError(f"{path}: not the configuration of a run; restore it, or start anew with `lra train`") from None
    return resolve(before), resolve(after)


def compose_run(overrides: list[str]) -> RunConfig:
    """The configuration that these Hydra overrides give."""
    register()
    refuse_schemas(overrides)
    try:
        with initialize_config_dir(str(conf_dir()), version_base=HYDRA_VERSION_BASE):
            return resolve(compose("config", overrides))
    except COMPOSITION_ERRORS as error:
        raise UserError(describe(error, overrides)) from None


COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, ValueError)
"""What Hydra raises for a bad override; a group set to null is a plain ``ValueError``."""


def describe(error: Exception, overrides: list[str], known: DictConfig | None = None) -> str:
    """Hydra's and OmegaConf's exceptions as one line: key, expected, found, nearest valid name.

    ``known`` has all valid keys; without it they are those that the overrides compose.
    """
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = str(error.missing_cfg_file).partition("/")
        options = _group_options(group)
        return f"{group}={name} is unknown; choose {' | '.join(options)}{nearest(name, options)}"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: not a valid override; write key=value, and quote values with brackets or commas"
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    text = str(cause).strip().splitlines()[0]
    key = getattr(cause, "full_key", None)
    if key:
        # of one given twice the last counts
        given = next((o for o in reversed(overrides) if o.lstrip("+~").split("=")[0] == key), key)
        if "not in" in text:
            keys = _known_keys(_composed(overrides) if known is None else known)
            return f"{given}: there is no key {key!r}{unknown_key(key, keys)}"
        return f"{given}: {_plain(text)}"
    if "Ambiguous value" in text or "requires --multirun" in text:
        return f"{text}: one run takes one value; for several use `lra sweep`, or -m"
    if text.startswith("Config group override"):
        nulls = [o for o in overrides if o.endswith("=null") and (conf_dir() / o.split("=")[0]).is_dir()]
        return f"{' '.join(nulls) or text}: a group needs a name; leave it out for the default"
    culprit = _culprit(str(error), overrides)
    return f"{culprit}: {text}" if culprit and culprit not in text else text


def _plain(text: str) -> str:
    """What OmegaConf says of a value that is of another type, as expected, found, and the way out."""
    if text.endswith("is not Optional"):
        return "expected a value, found null; leave it out for the default"
    for pattern, expected in (
        (r"Value (.*) of type '\w+' could not be converted to Integer", "a whole number"),
        (r"Value (.*) of type '\w+' could not be converted to Float", "a number"),
        (r"Value (.*) is not a valid bool", "true or false"),
        (r"Cannot convert '\w+' to string: (.*)", "one word or text in quotes"),
    ):
        if match := re.match(pattern, text):
            return f"expected {expected}, found {match[1]}"
    return text


def _culprit(text: str, overrides: list[str]) -> str | None:
    return next((o for o in overrides if o.lstrip("+~").split("=")[0] in text), None)


def _group_options(group: str) -> list[str]:
    folder = conf_dir() / group
    return sorted(str(p.relative_to(folder).with_suffix("")) for p in folder.rglob("*.yaml"))


def refuse_schemas(overrides: list[str]) -> None:
    """Raise ``UserError`` for a dataclass that Hydra would take as a choice: it lacks what the YAML sets."""
    for override in overrides:
        if override.split("=")[0] in ("attention", "task") and "_schema" in override:
            raise UserError(f"{override}: a schema is no choice; leave out _schema")


def choices() -> str:
    """The names of every group, a line each."""
    groups = sorted(path.name for path in conf_dir().iterdir() if path.is_dir())
    return "\n".join(f"{group + '=':<12} {' | '.join(_group_options(group))}" for group in groups)


def _known_keys(config: DictConfig) -> Iterator[str]:
    """All keys of a configuration, and the groups that leave no key of their own."""
    tree = OmegaConf.to_container(config, resolve=False)
    for key, value in tree.items():
        yield key
        if isinstance(value, dict):
            yield from (f"{key}.{name}" for name in value)
    yield from (p.name for p in conf_dir().iterdir() if p.is_dir() and p.name not in tree)


def _composed(overrides: list[str]) -> DictConfig:
    """The configuration with the groups that the overrides choose, and no other change."""
    register()
    chosen = [o for o in overrides if (conf_dir() / o.split("=")[0]).is_dir() and "," not in o]
    with initialize_config_dir(str(conf_dir()), version_base=HYDRA_VERSION_BASE):
        return compose("config", chosen)
