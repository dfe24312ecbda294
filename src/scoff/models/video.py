"""A model that watches a video and tells the next frame, or the next hundred.

    frames -> trunk -> map of positions -> recurrent layer -> object files -> pictures -> next frame

Axis letters: N clips, T frames, C colour channels, H and W pixels, F object files, P positions.
"""

from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

import scoff
from scoff.models.decoders import (
    Decoded,
    MaskedDecoder,
    PooledDecoder,
    at_least_single,
)
from scoff.models.likelihoods import Bernoulli, Categorical, DiscreteNormal, Likelihood
from scoff.models.pictures import PositionEncoder, VectorEncoder
from scoff.models.places import StartAtPlaces
from scoff.models.video_layers import keep_more, make_layer
from scoff.models.video_options import READS_POSITIONS, VideoOptions
from scoff.nn.checks import check_size
from scoff.nn.recurrent import RecurrentLayer
from scoff.nn.types import State
from scoff.worlds.dynamics import stack_frames


class VideoState(NamedTuple):
    """All that a model keeps of what it has seen."""

    hidden: State | None = None
    """Of the recurrent layer. None: a fresh one."""
    recent: Tensor | None = None
    """[N, stack - 1, C, H, W], the last frames. None: a clip begins."""


class Predictions(NamedTuple):
    logits: Tensor
    """[N, T, C, H, W]; what they tell of a frame, the likelihood knows."""
    errors: Tensor | None
    """[N, T], mean negative log-likelihood of the targets in nats, if there are targets."""
    state: VideoState
    choices: Tensor | None = None
    """[N, T, F, S], how likely each schema was at each of the given frames, if that is wanted."""
    likelihood: Likelihood = Bernoulli()

    @property
    def frames(self) -> Tensor:
        """[N, T, C, H, W] from 0 to 1"""
        return self.likelihood.frames(self.logits)


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
            self.likelihood = DiscreteNormal(o.channels) if o.colour else Bernoulli(o.doubt)
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
        tell_choices: bool = False,
        noise: Tensor | None = None,
        choice: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Predictions:
        """Predicts what follows each of the frames, then goes on by itself.

        Args:
            frames: [N, T, C, H, W] from 0 to 1.
            state: what was seen before. Default: nothing.
            targets: frames that are predicted, where errors are wanted.
            free: how many more frames to predict, each from the prediction before it.
            tell_choices: whether to tell how likely each schema was (SCOFF only), with gradients.
            noise: Gumbel noise [N, T', F, S] on the choice of schemata at the T' = T - stack + 1
                steps that are watched (SCOFF only). Default: fresh in training, none in evaluation.
            choice: schemata to take at these steps [K * N, T', F], whatever their merit (SCOFF
                only). All clips are watched K times, one time after the other, and so are
                predictions K * N. Default: those of most merit.
            generator: with one, what is fed back is drawn from a prediction, pixel by pixel, so
                that frames are one course of events of many. Default: it is the prediction itself.
        """
        output, state, likely = self._watch(frames, state, tell_choices, noise, choice)
        logits = [self.decoder(output).logits]
        for _ in range(free):
            last = logits[-1][:, -1:]
            if generator is None:
                last = self.likelihood.frames(last)
            else:
                last = self.likelihood.draw(last, generator)
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
        return Predictions(whole, errors, state, likely, self.likelihood)

    def loss(self, frames: Tensor, free: int = 0) -> Tensor:
        """Mean error of next-frame prediction, the last `free` frames from predictions alone."""
        self._check(frames)
        at_hand = frames.device.type == "cpu" and not torch.compiler.is_compiling()
        if at_hand and frames.numel() and not self.options.classes:
            least, most = (x.item() for x in frames.aminmax())
            if least < 0 or most > 1:
                raise ValueError(f"frames: got {least:.3g} to {most:.3g}, wants 0 to 1")
        stack = self.options.stack
        last = frames.shape[1] - 1 - free
        if last < stack:
            raise ValueError(
                f"frames: got {frames.shape[1]}, wants at least {stack + 1 + free}: {stack} to "
                f"predict from, one to predict and free = {free}"
            )
        predictions = self(frames[:, :last], targets=frames[:, stack:], free=free)
        return cast(Tensor, predictions.errors).mean()

    def rollout(
        self,
        frames: Tensor,
        steps: int,
        state: VideoState | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The `steps` frames that follow, each predicted from the one before  [N, steps, C, H, W],
        or, with a generator, from a draw of it.

        What a rollout looks like inside, `trace` tells of the given and the predicted frames.
        """
        check_size("steps", steps)
        return self(frames, state, free=steps - 1, generator=generator).frames[:, -steps:]

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
        return self.decoder(output).decoded(self.likelihood)

    def _watch(
        self,
        frames: Tensor,
        state: VideoState | None,
        tell_choices: bool = False,
        noise: Tensor | None = None,
        choice: Tensor | None = None,
    ) -> tuple[Tensor, VideoState, Tensor | None]:
        """The layer's output at each frame [N, T, hidden_size], the state after the last, and how
        likely each schema was [N, T, F, S]"""
        x, start, repeats, recent = self._read(frames, state)
        if tell_choices and start is None:
            start = cast(RecurrentLayer, self.rnn).initial_state(len(x))
        if choice is not None:
            times, left = divmod(len(choice), len(x))
            if left or not times:
                raise ValueError(f"choice: got {len(choice)}, wants a multiple of {len(x)} clips")
            x, recent = repeat(x, times, 0), repeat(recent, times, 0)
            noise = None if noise is None else repeat(noise, times, 0)
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
        if tell_choices:
            before = torch.cat([cast(Tensor, start)[0][:, None], output[:, :-1]], 1)
            cell = cast(scoff.SCOFFCell, cast(scoff.SCOFF, self.rnn).cells[0])
            likely = cell.schema_probs(x.flatten(0, 1), before.flatten(0, 1))
            likely = at_least_single(likely).unflatten(0, x.shape[:2])[:, repeats:]
        return output[:, repeats:], VideoState(hidden, recent), likely

    def _check(self, frames: Tensor) -> None:
        o = self.options
        wants = f"(N, T, {o.channels}, {o.frame_size}, {o.frame_size})"
        if frames.ndim != 5 or tuple(frames.shape[2:]) != (o.channels, o.frame_size, o.frame_size):
            raise ValueError(f"frames: got shape {tuple(frames.shape)}, wants {wants}")
        if not frames.is_floating_point():
            raise TypeError(f"frames: got {frames.dtype}, wants numbers from 0 to 1, as float32")

    def _read(
        self, frames: Tensor, state: VideoState | None
    ) -> tuple[Tensor, State | None, int, Tensor]:
        """What the layer is run on, from which state, how many steps only repeat the first frame,
        and which frames are to be kept"""
        o = self.options
        self._check(frames)
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
