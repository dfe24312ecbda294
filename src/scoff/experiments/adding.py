"""Adding some of a sequence's numbers, and more of them than in training.

A sequence of numbers, some of them marked; the answer is the sum of those. Models are trained on
sequences of 50 numbers with two or four operands and tested on 200 and more with up to ten. The
paper's appendix "Adding Task": SCOFF's error stays low, and with two schemata one is chosen at
operands, the other elsewhere.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn
from tqdm import tqdm

import scoff
from scoff.experiments.base import Experiment, Finished, Preset
from scoff.experiments.measures import entropy, joint_counts, mutual_information
from scoff.models.regressor import ReadoutName, SequenceRegressor
from scoff.ops.rims import backend_like
from scoff.ops.scoff import Backend
from scoff.training.errors import UsageError
from scoff.training.settings import Settings, flag
from scoff.worlds.adding import Additions, additions

if TYPE_CHECKING:
    from scoff.report import Section

MODELS = {
    "scoff": "SCOFF",
    "scoff-sparse": "SCOFF, sparse",
    "rims": "RIMs",
    "rmc": "RMC",
    "lstm": "LSTM",
    "gru": "GRU",
}

# what is learned and how it is tested; runs that differ in these cannot be compared
TASK = [
    "length",
    "operands",
    "train_sequences",
    "data_seed",
    "valid_length",
    "valid_operands",
    "valid_sequences",
    "test_lengths",
    "test_operands",
    "test_sequences",
]

OPEN = 3.0  # bias of a gate that lets 95 % through


@dataclass(frozen=True)
class Config(Settings):
    model: Literal["scoff", "scoff-sparse", "rims", "rmc", "lstm", "gru"] = "scoff"
    """Recurrent layer. scoff updates all object files at each step, scoff-sparse some."""

    length: int = 50
    """Numbers in a training sequence."""
    operands: tuple[int, ...] = (2, 4)
    """How many of them are to be added, each as often as the others."""
    train_sequences: int = 100_000
    """Size of the training set: the paper's 50,000 for each of the two numbers of operands."""
    valid_sequences: int = 10_000
    """Size of the validation set."""
    valid_length: int | None = None
    """Length of the validation sequences. None: as in training."""
    valid_operands: tuple[int, ...] | None = None
    """Operands of the validation sequences. None: as in training."""
    test_lengths: tuple[int, ...] = (200, 500, 1000)
    """Lengths of the test sequences."""
    test_operands: tuple[int, ...] = (2, 3, 4, 5, 8, 9, 10)
    """Numbers of operands in the test sequences."""
    test_sequences: int = 20_000
    """Test sequences of each length and number of operands."""
    data_seed: int = 0
    """Of all three sets, apart from --seed so that all runs see the same data."""

    hidden_size: int = 300
    """Size of the whole state."""
    embedding: int = 64
    """Size of the vector that each number and its marker become."""
    readout: ReadoutName = "sum"
    """After the last step: a linear map of each object file, summed (linear); of its change since
    the start, without a bias (change); a small network of each, summed (sum); or that with
    attention over the object files (attention)."""
    cell: Literal["gru", "lstm"] = "gru"
    """What schemata and the modules of RIMs are."""
    object_files: int = 5
    """Object files of SCOFF, modules of RIMs, memory slots of RMC."""
    active: int = 3
    """How many object files or modules are updated at each step (scoff-sparse, rims)."""
    schemata: int = 2
    """Schemata of SCOFF."""
    temperature: float = 1.0
    """Of the choice of a schema."""
    input_reduction: Literal["sum", "mean"] = "sum"
    """Whether SCOFF's attention scales what an object file reads (sum, as in the paper), or decides
    only which object files are updated (mean: the input is a single position)."""
    detach_input_query: bool = False
    """Errors are not led back through where an object file of SCOFF looks to its state: that is
    the way on which gradients explode."""
    keep: tuple[float, ...] = (0.0,)
    """Added to the biases of the gates that keep the state (GRU's update gate, LSTM's and RMC's
    forget gate) when weights are drawn: above 0, a layer at first forgets slowly. Several: one for
    each schema, so that --schemata other than 2 wants another --keep where a preset has two; layers
    without schemata take the first."""
    additive: bool = False
    """GRU cells start with weights by which what is written is added to the state."""
    schema_scale: float = 1.0
    """The weights that choose SCOFF's schemata start this many times as large."""
    readout_std: float | None = None
    """Of the weights of a linear readout, at first: the larger they are, the smaller can the state
    be, and the less do its nonlinearities bend it. None: as nn.Linear."""
    initial_mean: float = 0.0
    """How far SCOFF's object files start from zero, at first."""
    initial_std: float = 0.5
    """How far they start from each other, at first."""
    communication: Literal["gated", "residual", "none"] = "gated"
    """How object files or modules read each other. residual: as in the paper, unbounded."""
    input_heads: int = 4
    """Heads of the input attention."""
    input_dropout: float = 0.0
    """Dropout on what object files or modules read of the input."""
    comm_dropout: float = 0.0
    """Dropout on what they read of each other."""
    backend: Backend = "batched"
    """How SCOFF is computed: by PyTorch (batched: what the published results were trained with;
    reference: slow and plain), by Triton kernels on a GPU (fused, wide), or by the fastest that can
    (auto)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        valid = self.operands if self.valid_operands is None else self.valid_operands
        for name, least in (
            ("train_sequences", 1),
            ("valid_sequences", len(valid)),
            ("test_sequences", 1),
            ("embedding", 1),
            ("data_seed", 0),
            ("initial_mean", 0),
            ("initial_std", 0),
            ("readout_std", 0),
            ("schema_scale", 0),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value < 2**63:
                raise UsageError(f"--{flag(name)}: got {value}, wants at least {least}")
        if not all(map(math.isfinite, self.keep)):
            raise UsageError(f"--keep: got {self.keep}, wants finite numbers")
        if not self.test_lengths:
            raise UsageError("--test-lengths: got none, wants at least one")
        if (self.schemata + 1) ** self.object_files >= 2**62:
            raise UsageError(
                f"--object-files: got {self.object_files}, which is too many to tell apart what "
                "all of them choose"
            )
        if len(self.keep) not in (1, self.schemata):
            raise UsageError(
                f"--keep: got {len(self.keep)} numbers, wants 1 or --schemata = {self.schemata}"
            )
        for length, operands in (
            (self.length, self.operands),
            (self.length if self.valid_length is None else self.valid_length, valid),
            *((length, self.test_operands) for length in self.test_lengths),
        ):
            if not operands or min(operands) < 1 or max(operands) > length:
                raise UsageError(
                    f"got operands {operands} among {length} numbers, wants from 1 to {length}"
                )


# --- model and training


def make_model(config: Config) -> SequenceRegressor:
    c = config
    communication = None if c.communication == "none" else c.communication
    if c.model in ("scoff", "scoff-sparse"):
        rnn = scoff.SCOFF(
            c.embedding,
            c.hidden_size,
            batch_first=True,
            num_object_files=c.object_files,
            num_schemata=c.schemata,
            active_object_files=c.active if c.model == "scoff-sparse" else None,
            cell=c.cell,
            temperature=c.temperature,
            communication=communication,
            input_heads=c.input_heads,
            input_reduction=c.input_reduction,
            detach_input_query=c.detach_input_query,
            input_dropout=c.input_dropout,
            comm_dropout=c.comm_dropout,
            backend=c.backend,
        )
        cell = cast(scoff.SCOFFCell, rnn.cells[0])
        nn.init.normal_(cell.initial_mean, std=c.initial_mean)
        nn.init.constant_(cell.initial_std, c.initial_std)
        with torch.no_grad():
            cell.schema_query.mul_(c.schema_scale)
            cell.schema_key.mul_(c.schema_scale)
    elif c.model == "rims":
        rnn = scoff.RIMs(
            c.embedding,
            c.hidden_size,
            batch_first=True,
            num_modules=c.object_files,
            active_modules=c.active,
            cell=c.cell,
            communication=communication,
            input_heads=c.input_heads,
            input_dropout=c.input_dropout,
            comm_dropout=c.comm_dropout,
            backend=backend_like(c.backend),
        )
    elif c.model == "rmc":
        rnn = scoff.RMC(
            c.embedding, c.hidden_size, batch_first=True, num_slots=c.object_files, num_heads=4
        )
    else:
        kind = nn.LSTM if c.model == "lstm" else nn.GRU
        rnn = kind(c.embedding, c.hidden_size, batch_first=True)
    start_keeping(rnn, c.keep, c.additive)
    slots = 1 if c.model in ("lstm", "gru") else c.object_files
    model = SequenceRegressor(2, 1, rnn, slots, c.readout)
    if c.readout_std is not None:
        nn.init.normal_(model.read.out.weight, std=c.readout_std)
    return model


@torch.no_grad()
def start_keeping(rnn: nn.Module, keep: Sequence[float], additive: bool) -> None:
    """Opens the gates that keep the state, and makes writing an addition to it."""
    gates = 4 if is_lstm(rnn) else 3
    for name, parameter in rnn.named_parameters():
        leaf = name.split(".")[-1]
        if leaf == "forget_gate_bias":  # RMC
            parameter += keep[0]
        elif leaf.startswith("bias_ih"):
            # of GRU's gates (reset, update, new) and LSTM's (input, forget, ...) the second keeps
            parts = parameter.unflatten(-1, (gates, -1))
            several = len(keep) > 1 and isinstance(rnn, scoff.SCOFF)
            parts[..., 1, :] += parts.new_tensor(keep)[:, None] if several else keep[0]
            if additive and gates == 3:
                parts[..., 0, :] += OPEN
        elif leaf.startswith("weight_hh") and additive and gates == 3:
            new = parameter.unflatten(-2, (gates, -1))[..., 2, :, :]
            new.copy_(torch.eye(new.shape[-1]).expand_as(new))


def is_lstm(rnn: nn.Module) -> bool:
    return isinstance(rnn, nn.LSTM) or getattr(rnn, "num_states", 1) == 2


class AddingTask:
    def __init__(self, config: Config, device: torch.device):
        self.config, self.device = config, device
        self.train_size = config.train_sequences
        self.model = make_model(config)

    def batch(self, index: Tensor) -> Additions:
        c = self.config
        return additions(c.data_seed, index, c.length, c.operands, "train")

    def loss(self, model: nn.Module, batch: Additions) -> tuple[Tensor, Mapping[str, Tensor]]:
        return nn.functional.mse_loss(model(batch.x)[:, 0], batch.target), {}

    def validate(self, model: nn.Module) -> dict[str, float]:
        """The mean squared error for each number of operands, and of all."""
        c = self.config
        length = c.length if c.valid_length is None else c.valid_length
        operands = c.operands if c.valid_operands is None else c.valid_operands
        squares, counts = squared_errors(
            model, self.device, c.data_seed, c.valid_sequences, length, operands, "valid"
        )
        by_count = {n: squares[counts == n].mean().item() for n in sorted(set(operands))}
        overall = squares.mean().item()
        return {"mse": overall, **{f"mse_{n}": value for n, value in by_count.items()}}


# --- evaluation


def chunks(size: int, length: int, device: torch.device) -> Sequence[Tensor]:
    """Numbers of sequences in pieces that fit into memory"""
    elements = 100_000 if device.type == "cpu" else 1_500_000
    return torch.arange(size, device=device).split(max(1, elements // length))


def squared_errors(
    model: nn.Module,
    device: torch.device,
    seed: int,
    size: int,
    length: int,
    operands: tuple[int, ...],
    split: Literal["valid", "test"],
) -> tuple[Tensor, Tensor]:
    """Of each sequence, and its number of operands  [size], [size]"""
    parts = []
    for index in chunks(size, length, device):
        data = additions(seed, index, length, operands, split)
        parts.append(((model(data.x)[:, 0].float() - data.target).square(), data.num_operands))
    squares, counts = zip(*parts, strict=True)
    return torch.cat(squares).double().cpu(), torch.cat(counts).cpu()


@torch.no_grad()
def evaluate(config: Config, model: nn.Module, device: torch.device) -> dict[str, Any]:
    """Errors on the test sets; what the schemata have to do with operands; an example."""
    assert isinstance(model, SequenceRegressor)
    task = AddingTask(config, device)
    errors: dict[int, dict[int, float]] = {length: {} for length in config.test_lengths}
    tests = [(length, n) for length in config.test_lengths for n in config.test_operands]
    for length, n in tqdm(tests, "testing", unit="set", disable=None):  # a bar on terminals only
        size, seed = config.test_sequences, config.data_seed
        squares, _ = squared_errors(model, device, seed, size, length, (n,), "test")
        errors[length][n] = squares.mean().item()
    result: dict[str, Any] = {"valid": task.validate(model), "errors": errors}
    if isinstance(model.rnn, scoff.SCOFF):
        result["schemata"] = schema_use(config, model, device)
        result["example"] = example(config, model, device)
    return result


def schema_use(config: Config, model: SequenceRegressor, device: torch.device) -> dict[str, Any]:
    """What the choice of schemata tells about whether an element is an operand, on the test set.

    Of object files that are updated: `bits` of information in a single one's choice. In all choices
    at a step together, with who was updated: `pattern_bits`. Neither can exceed its `_at_most`.
    """
    rnn = cast(scoff.SCOFF, model.rnn)
    files, schemata = rnn.num_object_files, rnn.num_schemata
    choices = schemata + 1  # or none, where it is not updated
    single = torch.zeros(2, choices, dtype=torch.int64)
    patterns: Counter[int] = Counter()  # of 2 * code of all choices + whether it is an operand
    place = choices ** torch.arange(files, device=device)
    length = config.test_lengths[0]
    for n in config.test_operands:
        for index in chunks(config.test_sequences, length, device):
            data = additions(config.data_seed, index, length, (n,), "test")
            trace = rnn.trace(model.embed(data.x))
            operand = data.is_operand.long()  # [N, L]
            choice = torch.where(trace.active, trace.schema, schemata)  # [N, L, F]
            both = operand[..., None].expand_as(choice)
            single += joint_counts(both, choice, 2, choices).cpu()
            codes, counts = torch.unique(2 * (choice * place).sum(-1) + operand, return_counts=True)
            patterns.update(dict(zip(codes.tolist(), counts.tolist(), strict=True)))
    codes = sorted({code // 2 for code in patterns})
    pattern = torch.tensor([[patterns[2 * code + row] for code in codes] for row in (0, 1)])
    chosen = single[:, :schemata]
    shares = chosen / chosen.sum(1, keepdim=True).clamp(min=1)
    return {
        "length": length,
        "bits": mutual_information(chosen),
        "bits_at_most": entropy(chosen.sum(1)),
        "pattern_bits": mutual_information(pattern),
        "pattern_bits_at_most": entropy(pattern.sum(1)),
        "use_elsewhere": shares[0].tolist(),
        "use_at_operands": shares[1].tolist(),
    }


def example(config: Config, model: SequenceRegressor, device: torch.device) -> dict[str, Any]:
    """A sequence of eight with two operands, as in the paper's figure."""
    data = additions(
        config.data_seed, torch.zeros(1, dtype=torch.int64, device=device), 8, (2,), "test"
    )
    trace = cast(scoff.SCOFF, model.rnn).trace(model.embed(data.x))
    return {
        "values": data.x[0, :, 0].tolist(),
        "is_operand": data.is_operand[0].tolist(),
        "probs": trace.schema_probs[0].tolist(),
        "active": trace.active[0].tolist(),
        "target": data.target.item(),
        "answer": model(data.x).item(),
    }


def report(runs: Sequence[Finished]) -> "Sequence[Section]":
    from scoff.experiments.adding_report import report

    return report(runs)


# --- presets


def paper(model: str) -> Config:
    """The paper's table of hyper-parameters, with the learning rate of its text. Cells are GRUs, as
    in its Algorithm 1 (the text of this task has LSTMs), and communication is gated."""
    return Config(
        model=cast(Any, model),
        steps=100 * 100_000 // 64,
        batch_size=64,
        lr=1e-3,
        input_dropout=0.1,
        comm_dropout=0.1,
        readout="attention",
        validate_every=5000,
        checkpoint_every=5000,
    )


def tuned(model: str) -> Config:
    """Found on validation data, by extrapolation inside the training range: results/adding.md."""
    own: dict[str, dict[str, Any]] = {
        "scoff": {"keep": (9.0, -1.0), "readout_std": 0.3, "schema_scale": 4.0},
        "scoff-sparse": {
            "lr": 2e-3,
            "keep": (9.0, -1.0),
            "readout_std": 0.3,
            "schema_scale": 4.0,
            "active": 1,
            "input_reduction": "mean",
        },
        "rims": {"keep": (7.0,), "active": 2},
        "rmc": {"keep": (1.0,), "readout_std": None, "lr": 1e-3},
        "lstm": {"keep": (3.0,), "lr": 1e-3},
        "gru": {"keep": (12.0,), "lr": 1e-3},
    }
    common = Config(
        model=cast(Any, model),
        steps=5000,
        batch_size=256,
        lr=3e-3,
        warmup=0.1,
        decay="cosine",
        readout="change",
        readout_std=1.0,
        additive=True,
        schema_scale=2.0,
        initial_std=0.1,
        communication="none",
        input_heads=1,
        validate_every=500,
        checkpoint_every=1000,
    )
    return replace(common, **own[model])


def quick(model: str) -> Config:
    return replace(
        tuned(model),
        steps=1600,
        batch_size=32,
        lr=3e-3,  # for so few steps
        readout_std=0.5 if model.startswith("scoff") else 1.0,
        schema_scale=6.0,
        length=30,
        valid_sequences=1000,
        test_lengths=(120,),
        test_operands=(2, 3, 4, 5, 8),
        test_sequences=500,
        hidden_size=100,
        embedding=16,
        validate_every=100,
        checkpoint_every=400,
    )


EXPERIMENT = Experiment(
    name="adding",
    title="Adding more numbers than in training",
    summary="Add the marked numbers of a sequence; tested on longer ones with more of them.",
    claim="Models read a sequence of numbers, some of them marked, and are to tell the sum of "
    "those. The question is whether what they learn on short sequences with few operands holds on "
    "longer ones with more.",
    config=Config,
    models=MODELS,
    presets={
        "quick": Preset(
            "small and short: minutes on two CPU cores",
            quick,
            ("scoff-sparse", "scoff", "lstm", "gru"),
            seeds=1,
        ),
        "tuned": Preset("found on validation data: minutes on a GPU", tuned, tuple(MODELS)),
        "paper": Preset("the paper's sizes, batch and learning rate: hours", paper, tuple(MODELS)),
    },
    make_task=AddingTask,
    evaluate=evaluate,
    report=report,
)
