"""A model that watches a video and tells the next frame, or the next hundred.

    frames -> trunk -> map of positions -> recurrent layer -> object files -> pictures -> next frame

Axis letters: N clips, T frames, C colour channels, H and W pixels, F object files, P positions.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

import scoff
from scoff.models.likelihoods import Bernoulli, Categorical, DiscreteLogistic
from scoff.models.pictures import (
    HALVINGS,
    PAINTERS,
    PainterName,
    PositionEncoder,
    VectorEncoder,
    keep_scale,
)
from scoff.models.places import StartAtPlaces
from scoff.nn.checks import check_choice, check_divides, check_finite, check_rate, check_size
from scoff.nn.readout import Readout
from scoff.nn.recurrent import RecurrentLayer
from scoff.nn.types import State
from scoff.ops.mixture import mix, mix_classes
from scoff.ops.scoff import Backend
from scoff.worlds.dynamics import stack_frames

LayerName = Literal["scoff", "scoff-sparse", "rims", "rmc", "lstm", "gru"]
DecoderName = Literal["masks", "attention"]
StartName = Literal["alike", "places"]

READS_POSITIONS: tuple[LayerName, ...] = ("scoff", "scoff-sparse", "rims")
READOUT_HEADS = 4


@dataclass(frozen=True)
class VideoParts:
    """What a video model is made of, whatever its recurrent layer."""

    hidden_size: int = 400
    """Size of the whole state."""
    object_files: int = 4
    """Object files of SCOFF, modules of RIMs, memory slots of RMC."""
    active: int = 3
    """How many object files or modules are updated at each step (scoff-sparse, rims)."""
    schemata: int = 4
    """Schemata of SCOFF."""
    cell: Literal["gru", "lstm"] = "gru"
    """What schemata and the modules of RIMs are."""
    keep_bias: float = 0.0
    """How much is added at first to the bias of gates that keep the state (the update gate of GRUs,
    the forget gate of LSTMs and of RMC), so that more of it lasts."""
    temperature: float = 1.0
    """Of the choice of a schema."""
    input_heads: int = 1
    """Heads of the attention over positions."""
    input_value_size: int | None = None
    """Of what an object file or module reads, over all heads. None: its own size."""
    input_dropout: float = 0.0
    """Dropout on what object files or modules read of the input."""
    comm_dropout: float = 0.0
    """Dropout on what they read of each other."""
    input_reduction: Literal["sum", "mean"] = "mean"
    """What an object file of SCOFF reads: the sum over positions weighted by its attention, as the
    paper has it, or their weighted mean."""
    attention_scale: float = 1.0
    """The weights of SCOFF's attention over positions start this many times as large."""
    start: StartName = "alike"
    """What object files or modules start a clip from: a common mean and, in SCOFF, noise (alike),
    or each from what is seen at one of those places of the first frame that stand out from its
    median colour (places). Other layers have no use for it."""
    detach_input_query: bool = False
    """Whether errors of what an object file of SCOFF reads are not led back, through where it
    looks, to its state: gradients may explode that way."""
    initial_std: float = 0.1
    """How far SCOFF's object files start from each other, at first, if they start alike. It is
    noise to the first few predictions, and too much of it drowns what was seen."""
    communication: Literal["gated", "residual", "none"] = "gated"
    """How object files or modules read each other. residual: as in the paper, unbounded."""
    backend: Backend = "auto"
    """How SCOFF is computed: by PyTorch (batched; reference: slow and plain), by Triton kernels on
    a GPU (fused, wide), or by the fastest that can (auto)."""

    frame_size: int = 64
    """Pixels on a side of a frame."""
    colour: bool = False
    """Whether frames are red, green and blue, or grey."""
    classes: int = 0
    """Pixels are of one of so many classes, each with a channel that is 1 where it is seen. 0: they
    are of some brightness."""
    stack: int = 1
    """How many of the last frames are read at each step."""
    map_size: int = 8
    """Positions on a side of the map that is attended to."""
    position_size: int = 64
    """Of what is read at each position."""
    vector_size: int | None = None
    """Of what layers without attention to positions (rmc, lstm, gru) read. None: hidden_size."""
    first_frame_steps: int = 1
    """Steps for which the first frame of a clip is looked at: object files may need a few to share
    out what there is."""
    input_noise: float = 0.0
    """Share of the input's pixels that are inverted in training."""
    drop_frames: float = 0.0
    """Share of the input's frames that are blank in training, never the first: what follows has to
    be told from memory."""

    decoder: DecoderName = "masks"
    """How object files become a frame: each is painted by itself and masks mix the pictures, or
    attention over them gives one vector, which is painted (the paper's words)."""
    painter: PainterName = "patches"
    """How a vector becomes a picture: put at all positions of a small map, which is grown to a
    quarter of the picture's size, where each position tells a patch (patches), or to all of it
    (broadcast); or through wide layers to such a map, as R-NEM does (deconvolution)."""
    features: int = 128
    """Size of what is painted: of the result of the siamese network on each object file."""

    def __post_init__(self) -> None:
        check_choice("decoder", self.decoder, DecoderName.__args__)
        check_choice("painter", self.painter, list(PAINTERS))
        check_choice("start", self.start, StartName.__args__)
        for name in (
            "hidden_size",
            "object_files",
            "stack",
            "position_size",
            "first_frame_steps",
            "features",
            "frame_size",
        ):
            check_size(name, getattr(self, name))
        for name in ("input_noise", "drop_frames"):
            check_rate(name, getattr(self, name))
        check_finite("keep_bias", self.keep_bias)
        check_size("classes", self.classes, least=0)
        if self.classes == 1 or (self.classes and self.colour):
            got = f"{self.classes} with colour = {self.colour}"
            raise ValueError(f"classes: got {got}, wants two or more without colour, or 0")
        if self.decoder == "attention":
            check_divides("features", self.features, "heads of the readout", READOUT_HEADS)
        check_divides("frame_size", self.frame_size, "the smallest map's pixels", 1 << HALVINGS)
        maps = [self.frame_size >> halvings for halvings in range(HALVINGS + 1)]
        check_choice("map_size", self.map_size, maps)

    @property
    def channels(self) -> int:
        return self.classes or (3 if self.colour else 1)


@dataclass(frozen=True)
class VideoOptions(VideoParts):
    """What a video model is made of."""

    model: LayerName = "scoff"
    """Recurrent layer. scoff updates all object files at each step, scoff-sparse some."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("model", self.model, LayerName.__args__)

    @property
    def slots(self) -> int:
        """Parts of the state that are decoded alike."""
        return 1 if self.model in ("lstm", "gru") else self.object_files


class VideoState(NamedTuple):
    """All that a model keeps of what it has seen."""

    hidden: State | None = None
    """Of the recurrent layer. None: a fresh one."""
    recent: Tensor | None = None
    """[N, stack - 1, C, H, W], the last frames. None: a clip begins."""


class Predictions(NamedTuple):
    logits: Tensor
    """[N, T, C, H, W]; their sigmoid is the predicted frame, or with classes their softmax."""
    errors: Tensor | None
    """[N, T], mean negative log-likelihood of the targets in nats, if there are targets."""
    state: VideoState
    choices: Tensor | None = None
    """[N, T, F, S], how likely each schema was at each of the given frames, if that is wanted."""
    has_classes: bool = False

    @property
    def frames(self) -> Tensor:
        """[N, T, C, H, W] from 0 to 1"""
        return to_frames(self.logits, self.has_classes)


class Decoded(NamedTuple):
    logits: Tensor
    """[N, T, C, H, W]"""
    masks: Tensor | None
    """[N, T, F, H, W], whose picture is seen where; sum to 1. None without masks."""
    pictures: Tensor | None
    """[N, T, F, C, H, W], what each object file paints."""


class Painted(NamedTuple):
    """What a decoder makes: `Decoded`, but its pictures, large and seldom looked at, as logits."""

    logits: Tensor
    """[N, T, C, H, W]"""
    masks: Tensor | None
    """[N, T, F, H, W]"""
    picture_logits: Tensor | None
    """[N, T, F, C, H, W]; their sigmoid is what each object file paints, or with classes their
    softmax."""

    def decoded(self, has_classes: bool) -> Decoded:
        logits, masks, pictures = self
        return Decoded(
            logits, masks, None if pictures is None else to_frames(pictures, has_classes)
        )


class VideoTrace(NamedTuple):
    """What happened inside, at each frame."""

    decoded: Decoded
    attention: Tensor | None
    """[N, T, F, h, w], over the map. None for layers that read a vector."""
    layer: scoff.Trace | None
    """Chosen schemata and so on. None for nn.GRU and nn.LSTM."""


class VideoModel(nn.Module):
    """Predicts each frame of a clip from those before it.

    ```python
    model = VideoModel(VideoOptions(object_files=4, schemata=4))
    loss = model.loss(frames)                   # frames (N, T, 1, 64, 64): next-frame prediction
    future = model.rollout(frames[:, :15], 30)  # (N, 30, 1, 64, 64)
    seen = model.trace(frames)                  # attention, schemata, masks
    ```

    The state is passed explicitly. With a stack of frames the first prediction is that of frame
    number `stack`, counted from 0; a state that was handed back goes on without a gap.
    """

    def __init__(self, options: VideoOptions):
        super().__init__()
        self.options = o = options
        halvings = (o.frame_size // o.map_size).bit_length() - 1
        channels = o.channels * o.stack
        if o.model in READS_POSITIONS:
            self.encoder = PositionEncoder(channels, o.frame_size, halvings, o.position_size)
        else:
            size = o.hidden_size if o.vector_size is None else o.vector_size
            check_size("vector_size", size)
            self.encoder = VectorEncoder(channels, o.frame_size, halvings, size)
        self.rnn = make_layer(o, self.encoder.output_size)
        keep_more(self.rnn, o.keep_bias)
        self.decoder = (MaskedDecoder if o.decoder == "masks" else PooledDecoder)(o)
        if o.classes:
            self.likelihood = Categorical()
        else:
            self.likelihood = DiscreteLogistic(o.channels) if o.colour else Bernoulli()
        # last, so that all other weights are drawn as without it
        self.start = self._make_start() if o.start == "places" else None

    def _make_start(self) -> StartAtPlaces | None:
        o, encoder = self.options, self.encoder
        if not isinstance(encoder, PositionEncoder):
            return None
        if isinstance(self.rnn, scoff.SCOFF):
            # without a use they would never have a gradient, for which several GPUs wait
            cell = cast(scoff.SCOFFCell, self.rnn.cells[0])
            cell.initial_mean.requires_grad_(False)
            cell.initial_std.requires_grad_(False)
        return StartAtPlaces(
            o.frame_size,
            o.map_size,
            o.position_size,
            encoder.scale,
            o.object_files,
            o.hidden_size,
            cast(RecurrentLayer, self.rnn).num_states,
        )

    def forward(
        self,
        frames: Tensor,
        state: VideoState | None = None,
        targets: Tensor | None = None,
        free: int = 0,
        choices: bool = False,
        noise: Tensor | None = None,
        choice: Tensor | None = None,
    ) -> Predictions:
        """Predicts what follows each of the frames, then goes on by itself.

        Args:
            frames: [N, T, C, H, W] from 0 to 1.
            state: what was seen before. Default: nothing.
            targets: frames that are predicted, where errors are wanted.
            free: how many more frames to predict, each from the prediction before it.
            choices: whether to tell how likely each schema was (SCOFF only). Carries gradients.
            noise: Gumbel noise [N, T', F, S] on the choice of schemata at the T' = T - stack + 1
                steps that are watched (SCOFF only). Default: fresh in training, none in evaluation.
            choice: schemata to take at these steps [K * N, T', F], whatever their merit (SCOFF
                only). All clips are watched K times, one time after the other, and so are
                predictions K * N. Default: those of most merit.
        """
        output, state, likely = self._watch(frames, state, choices, noise, choice)
        logits = [self.decoder(output).logits]
        for _ in range(free):
            last = to_frames(logits[-1][:, -1:], self.options.classes > 0)
            output, state, _ = self._watch(last.to(frames.dtype), state)
            logits.append(self.decoder(output).logits)
        whole = torch.cat(logits, 1)
        errors = None
        if targets is not None:
            if targets.shape != whole.shape:
                raise ValueError(
                    f"targets: got shape {tuple(targets.shape)}, wants {tuple(whole.shape)}"
                )
            errors = self.likelihood(whole, targets)
        return Predictions(whole, errors, state, likely, self.options.classes > 0)

    def loss(self, frames: Tensor, free: int = 0) -> Tensor:
        """Mean error of next-frame prediction, the last `free` frames from predictions alone."""
        stack = self.options.stack
        last = frames.shape[1] - 1 - free
        if last < stack:
            raise ValueError(
                f"frames: got {frames.shape[1]}, wants at least {stack + 1 + free}: {stack} to "
                f"predict from, one to predict and free = {free}"
            )
        predictions = self(frames[:, :last], targets=frames[:, stack:], free=free)
        return cast(Tensor, predictions.errors).mean()

    def rollout(self, frames: Tensor, steps: int, state: VideoState | None = None) -> Tensor:
        """The `steps` frames that follow, each predicted from the one before  [N, steps, C, H, W]

        What a rollout looks like inside, `trace` tells of the given and the predicted frames.
        """
        check_size("steps", steps)
        return self(frames, state, free=steps - 1).frames[:, -steps:]

    def trace(self, frames: Tensor, state: VideoState | None = None) -> VideoTrace:
        """What happened while the frames were watched."""
        x, hidden, repeats, _ = self._read(frames, state)
        if not isinstance(self.rnn, RecurrentLayer):
            output, _ = self.rnn(x, hidden)
            return VideoTrace(self._decode(output[:, repeats:]), None, None)
        layer = self.rnn.trace(x, hidden)
        layer = scoff.Trace(*(cast(Tensor, part)[:, repeats:] for part in layer))
        attention = None
        if isinstance(self.encoder, PositionEncoder):
            side = self.options.map_size
            attention = layer.input_attention.unflatten(-1, (side, side))
        return VideoTrace(self._decode(cast(Tensor, layer.output)), attention, layer)

    def _decode(self, output: Tensor) -> Decoded:
        return self.decoder(output).decoded(self.options.classes > 0)

    def _watch(
        self,
        frames: Tensor,
        state: VideoState | None,
        choices: bool = False,
        noise: Tensor | None = None,
        choice: Tensor | None = None,
    ) -> tuple[Tensor, VideoState, Tensor | None]:
        """The layer's output at each frame [N, T, hidden_size], the state after the last, and how
        likely each schema was [N, T, F, S]"""
        x, start, repeats, recent = self._read(frames, state)
        if choices and start is None:
            start = cast(RecurrentLayer, self.rnn).initial_state(len(x))
        if choice is not None:
            times, left = divmod(len(choice), len(x))
            if left:
                raise ValueError(f"choice: got {len(choice)}, wants a multiple of {len(x)} clips")
            x, recent = repeat(x, times, 0), repeat(recent, times, 0)
            if isinstance(start, Tensor):
                start = repeat(start, times, 1)
            elif start is not None:
                start = (repeat(start[0], times, 1), repeat(start[1], times, 1))
        asked = {
            name: torch.cat([given[:, :1].expand(-1, repeats, *given.shape[2:]), given], 1)[None]
            for name, given in (("noise", noise), ("choice", choice))
            if given is not None
        }
        if asked and not isinstance(self.rnn, scoff.SCOFF):
            raise ValueError(
                f"{', '.join(asked)}: got one, but {self.options.model} has no schemata"
            )
        output, hidden = self.rnn(x, start, **asked)
        likely = None
        if choices:
            before = torch.cat([cast(Tensor, start)[0][:, None], output[:, :-1]], 1)
            cell = cast(scoff.SCOFFCell, cast(scoff.SCOFF, self.rnn).cells[0])
            likely = cell.schema_probs(x.flatten(0, 1), before.flatten(0, 1))
            likely = at_least_single(likely).unflatten(0, x.shape[:2])[:, repeats:]
        return output[:, repeats:], VideoState(hidden, recent), likely

    def _read(
        self, frames: Tensor, state: VideoState | None
    ) -> tuple[Tensor, State | None, int, Tensor]:
        """What the layer is run on, from which state, how many steps only repeat the first frame,
        and which frames are to be kept"""
        o = self.options
        shape = (o.channels, o.frame_size, o.frame_size)
        if frames.ndim != 5 or tuple(frames.shape[2:]) != shape:
            raise ValueError(f"frames: got shape {tuple(frames.shape)}, wants (N, T, *{shape})")
        hidden, recent = VideoState() if state is None else state
        if recent is not None:
            frames = torch.cat([recent, frames], 1)
        if frames.shape[1] < o.stack:
            raise ValueError(
                f"frames: got {frames.shape[1]}, wants at least stack = {o.stack} to begin with"
            )
        if self.training and o.drop_frames > 0 and state is None:
            kept = torch.rand(frames.shape[:2], device=frames.device) >= o.drop_frames
            kept[:, : o.stack] = True
            frames = frames * kept[..., None, None, None]
        stacked = stack_frames(frames, o.stack)
        if self.training and o.input_noise > 0:
            flipped = torch.rand_like(stacked) < o.input_noise
            stacked = torch.where(flipped, 1 - stacked, stacked)
        x = self.encoder(stacked.flatten(0, 1)).unflatten(0, stacked.shape[:2])
        if hidden is None and self.start is not None:
            hidden = self.start(stacked[:, 0, -o.channels :], x[:, 0])
        repeats = o.first_frame_steps - 1 if recent is None else 0
        if repeats:
            x = torch.cat([x[:, :1].expand(-1, repeats, *x.shape[2:]), x], 1)
        return x, hidden, repeats, frames[:, frames.shape[1] - (o.stack - 1) :]


def repeat(x: Tensor, times: int, axis: int) -> Tensor:
    """One after the other"""
    return x if times == 1 else torch.cat([x] * times, axis)


def make_layer(options: VideoOptions, input_size: int) -> nn.Module:
    o = options
    communication = None if o.communication == "none" else o.communication
    if o.model in ("scoff", "scoff-sparse"):
        layer = scoff.SCOFF(
            input_size,
            o.hidden_size,
            batch_first=True,
            num_object_files=o.object_files,
            num_schemata=o.schemata,
            active_object_files=o.active if o.model == "scoff-sparse" else None,
            cell=o.cell,
            temperature=o.temperature,
            communication=communication,
            input_heads=o.input_heads,
            input_reduction=o.input_reduction,
            input_value_size=o.input_value_size,
            input_dropout=o.input_dropout,
            detach_input_query=o.detach_input_query,
            comm_dropout=o.comm_dropout,
            backend=o.backend,
        )
        cell = cast(scoff.SCOFFCell, layer.cells[0])
        nn.init.constant_(cell.initial_std, o.initial_std)
        with torch.no_grad():
            cell.input_query.mul_(o.attention_scale)
            cell.input_key.mul_(o.attention_scale)
        return layer
    if o.model == "rims":
        return scoff.RIMs(
            input_size,
            o.hidden_size,
            batch_first=True,
            num_modules=o.object_files,
            active_modules=o.active,
            cell=o.cell,
            communication=communication,
            input_heads=o.input_heads,
            input_value_size=o.input_value_size,
            input_dropout=o.input_dropout,
            comm_dropout=o.comm_dropout,
        )
    if o.model == "rmc":
        return scoff.RMC(input_size, o.hidden_size, batch_first=True, num_slots=o.object_files)
    kind = nn.LSTM if o.model == "lstm" else nn.GRU
    return kind(input_size, o.hidden_size, batch_first=True)


@torch.no_grad()
def keep_more(layer: nn.Module, bias: float) -> None:
    """Opens gates that keep the state: the second of a GRU's three and of an LSTM's four."""
    for name, gates in layer.named_parameters():
        if name.endswith("forget_gate_bias"):  # RMC's
            gates += bias
        if "bias_ih" in name:
            size = layer.get_parameter(name.replace("bias_ih", "weight_hh")).shape[-1]
            gates[..., size : 2 * size] += bias


class MaskedDecoder(nn.Module):
    """Each object file paints a picture and says where it is to be seen."""

    def __init__(self, options: VideoOptions):
        super().__init__()
        o = options
        check_divides("hidden_size", o.hidden_size, "object_files", o.slots)
        self.slots, self.has_classes = o.slots, o.classes > 0
        self.siamese = nn.Sequential(
            nn.Linear(o.hidden_size // o.slots, o.features),
            nn.ReLU(),
            nn.Linear(o.features, o.features),
        )
        self.paint = PAINTERS[o.painter](o.features, o.channels + 1, o.frame_size)
        keep_scale(self)

    def forward(self, output: Tensor) -> Painted:
        """[N, T, hidden_size]"""
        files = self.siamese(output.unflatten(-1, (self.slots, -1)))  # [N, T, F, features]
        painted = self.paint(files.flatten(0, 2)).unflatten(0, files.shape[:3])
        # split, for its gradient is one tensor at once
        pictures, mask_logits = at_least_single(painted).split([painted.shape[-3] - 1, 1], -3)
        mixture = mix_classes if self.has_classes else mix
        logits, masks = mixture(pictures, mask_logits.squeeze(-3))
        return Painted(logits, masks, pictures)


class PooledDecoder(nn.Module):
    """Attention over the object files gives one vector, which is painted."""

    def __init__(self, options: VideoOptions):
        super().__init__()
        o = options
        self.pool = Readout(
            o.hidden_size, o.features, o.slots, features=o.features, num_heads=READOUT_HEADS
        )
        self.paint = PAINTERS[o.painter](o.features, o.channels, o.frame_size)
        keep_scale(self)

    def forward(self, output: Tensor) -> Painted:
        """[N, T, hidden_size]"""
        pooled = self.pool(output)
        painted = self.paint(pooled.flatten(0, 1)).unflatten(0, pooled.shape[:2])
        return Painted(at_least_single(painted), None, None)


def to_frames(logits: Tensor, has_classes: bool) -> Tensor:
    """[..., C, H, W] -> the same, from 0 to 1"""
    return logits.softmax(-3) if has_classes else logits.sigmoid()


def at_least_single(x: Tensor) -> Tensor:
    """Half precision has too few numbers for logarithms of small probabilities."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def count_parameters(options: VideoOptions) -> int:
    """Of the model with these options."""
    # built, for torch's device without memory takes seconds to get ready; no random number is spent
    with torch.random.fork_rng(devices=[]):
        return sum(p.numel() for p in VideoModel(options).parameters())


def match_width(options: VideoOptions, parameters: int) -> VideoOptions:
    """The same options with the hidden_size that comes nearest to so many parameters.

    A GRU as large as a SCOFF:

    ```python
    gru = match_width(replace(options, model="gru"), count_parameters(options))
    ```
    """
    # what a size must be a multiple of: slots, and in RMC the heads within each
    unit = options.slots * (4 if options.model == "rmc" else 1)

    def sized(units: int) -> VideoOptions:
        return replace(options, hidden_size=units * unit)

    if count_parameters(sized(1)) > parameters:
        raise ValueError(
            f"parameters: got {parameters}, wants at least {count_parameters(sized(1))}, those of "
            f"{options.model} with hidden_size = {unit}"
        )
    low, high = 1, 2
    while count_parameters(sized(high)) <= parameters:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if count_parameters(sized(middle)) <= parameters:
            low = middle
        else:
            high = middle
    return min(sized(low), sized(high), key=lambda o: abs(count_parameters(o) - parameters))
