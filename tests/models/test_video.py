"""The video model: what it predicts, that it goes on where it stopped, that slots have no names."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    pixel_shuffle,
)

import scoff
from scoff.models.pictures import (
    PAINTERS,
    TRUNK,
    FirstConv2d,
    Patches,
    PositionEncoder,
    Trunk,
    keep_scale,
    position_code,
)
from scoff.models.video import (
    VideoModel,
    VideoOptions,
    VideoState,
    count_parameters,
    match_width,
)
from scoff.ops.mixture import mix, mix_classes
from scoff.worlds.balls import balls
from scoff.worlds.dynamics import stack_frames
from tests.models.capturing import captured

SMALL = VideoOptions(
    hidden_size=24, object_files=3, active=2, schemata=2, frame_size=16, map_size=4, features=8
)
LAYERS = ("scoff", "scoff-sparse", "rims", "rmc", "lstm", "gru")
# every option that changes how the state is made or kept
WAYS = {
    "plain": {},
    "stack": {"stack": 3, "painter": "broadcast"},
    "repeats": {"first_frame_steps": 3},
    "attention": {"decoder": "attention", "painter": "deconvolution"},
    "colour": {"colour": True, "stack": 2, "painter": "deconvolution"},
    "classes": {"classes": 3, "stack": 2},
    "classes, attention": {"classes": 3, "decoder": "attention"},
}


def make(options=SMALL, **changes):
    if changes.get("model") == "rmc":
        changes["object_files"] = 2  # 24 / 2 is a multiple of its four heads
    return VideoModel(replace(options, **changes)).double()


def clips(options, n=2, frames=8):
    shape = (n, frames, options.channels, options.frame_size, options.frame_size)
    return torch.rand(shape, dtype=torch.float64)


def channels_last(layers):
    """Of what goes into and comes out of each layer, from now on"""
    seen = []

    def look(_, args, result):
        seen.extend(x.stride(1) == 1 for x in (*args, result))

    for layer in layers:
        layer.register_forward_hook(look)
    return seen


# --- shapes


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_learns_to_predict(layer, way):
    model = make(model=layer, **WAYS[way])
    frames = clips(model.options)
    model.loss(frames).backward()
    without = [name for name, p in model.named_parameters() if p.grad is None]
    assert without == []
    stack = model.options.stack
    predictions = model(frames)
    assert predictions.logits.shape == (2, 8 - stack + 1, *frames.shape[2:])
    assert model.rollout(frames, 5).shape == (2, 5, *frames.shape[2:])
    assert model.rollout(frames[:, :stack], 2).shape[1] == 2  # from as few as there must be


@pytest.mark.parametrize(("frame_size", "map_size"), [(64, 8), (64, 16), (32, 32), (16, 2)])
def test_sizes_of_frames_and_maps(frame_size, map_size):
    model = make(frame_size=frame_size, map_size=map_size)
    frames = clips(model.options, 1, 2)
    trace = model.trace(frames)
    assert trace.attention.shape == (1, 2, 3, map_size, map_size)
    assert trace.decoded.masks.shape == (1, 2, 3, frame_size, frame_size)
    # SCOFF's object files share out each position
    torch.testing.assert_close(trace.attention.sum(2), torch.ones_like(trace.attention[:, :, 0]))


def test_the_default_is_rnems_trunk():
    """Three convolutions of 4 x 4 that halve, of 16, 32 and 64 channels, normalised over the map"""
    trunk = Trunk(1, 3)
    assert trunk(torch.rand(2, 1, 64, 64)).shape == (2, 64, 8, 8)
    weights = [p.shape for name, p in trunk.named_parameters() if p.ndim == 4]
    assert weights == [(16, 1, 4, 4), (32, 16, 4, 4), (64, 32, 4, 4)]
    bent = trunk.layers[:3](torch.rand(2, 1, 64, 64))
    normal = torch.where(bent > 0, bent, bent.log1p())  # before ELU
    torch.testing.assert_close(normal.mean((1, 2, 3)), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(normal.var((1, 2, 3)), torch.ones(2), atol=1e-2, rtol=0)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("halvings", [0, 2, 3])
def test_the_trunk_is_padded_convolutions_and_group_norms(channels, halvings):
    trunk = Trunk(channels, halvings).double()
    for layer in trunk.layers:
        if isinstance(layer, nn.GroupNorm):  # not all ones and zeros
            nn.init.normal_(layer.weight)
            nn.init.normal_(layer.bias)
    plain = []
    for number, (before, width) in enumerate(pairwise((channels, *TRUNK))):
        halve = number < halvings
        plain += [
            nn.ZeroPad2d((1, 1, 1, 1) if halve else (1, 2, 1, 2)),
            nn.Conv2d(before, width, 4, stride=2 if halve else 1),
            nn.GroupNorm(1, width),
            nn.ELU(),
        ]
    plain = nn.Sequential(*plain).double()
    plain.load_state_dict(trunk.layers.state_dict())
    pictures = torch.rand(2, channels, 16, 16, dtype=torch.float64)
    features = plain(pictures)
    expected = features - features.mean((-2, -1), keepdim=True)
    torch.testing.assert_close(trunk(pictures), expected)
    gradients = [
        torch.autograd.grad(result.square().sum(), list(network.parameters()))
        for network, result in ((trunk, trunk(pictures)), (plain, expected))
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_of_the_trunk_are_neighbours_in_memory(channels):
    trunk = Trunk(channels, 2)
    seen = channels_last(trunk.layers)
    features = trunk(torch.rand(2, channels, 16, 16))
    assert seen == [True] * 2 * len(trunk.layers)
    # so that a row for each position is there without a copy
    assert features.flatten(2).mT.is_contiguous()


@settings(max_examples=20)
@given(
    pictures=st.integers(0, 3),
    channels=st.integers(1, 4),
    height=st.integers(4, 9),
    width=st.integers(4, 9),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    bias=st.booleans(),
)
def test_a_product_with_patches_is_the_convolution(
    pictures, channels, height, width, kernel, stride, padding, bias
):
    layer = FirstConv2d(channels, 5, kernel, stride, padding, bias=bias).double()
    x = torch.randn(pictures, channels, height, width, dtype=torch.float64, requires_grad=True)
    found = []
    for result in (layer.by_patches(x), layer(x)):
        loss = (result * torch.arange(result.numel()).view_as(result).cos()).sum()
        found.append((result, *torch.autograd.grad(loss, [x, *layer.parameters()])))
    torch.testing.assert_close(*found)
    assert found[0][0].permute(0, 2, 3, 1).is_contiguous()


def test_which_convolution_is_of_patches():
    """The first, if it halves and the picture has few channels; on a CPU it is as any other"""

    def kinds(*options):
        convolutions = [x for x in Trunk(*options).layers if isinstance(x, nn.Conv2d)]
        return [isinstance(x, FirstConv2d) for x in convolutions]

    assert kinds(1, 3) == kinds(4, 1) == [True, False, False]
    assert kinds(1, 0) == kinds(5, 3) == [False] * 3
    layer, x = FirstConv2d(2, 3, 4, stride=2, padding=1), torch.rand(2, 2, 8, 8)
    assert torch.equal(layer(x), nn.Conv2d.forward(layer, x))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.by_patches(x).dtype == torch.bfloat16


def test_half_precision_of_the_trunk():
    """Features are rounded, their mean is not; what is handed back is of the pictures' type"""
    trunk, kinds = Trunk(1, 3), []
    for layer in trunk.layers:
        if isinstance(layer, nn.GroupNorm):
            layer.register_forward_hook(lambda *given: kinds.append(given[-1].dtype))
    pictures = torch.rand(2, 1, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        features = trunk(pictures)
    assert kinds == [torch.bfloat16] * 3
    assert features.dtype == torch.float32
    assert features.mean((-2, -1)).abs().max() < 1e-6
    torch.testing.assert_close(features, trunk(pictures), atol=0.1, rtol=0)
    assert trunk.bfloat16()(pictures.bfloat16()).dtype == torch.bfloat16


def test_what_is_read_of_all_positions_alike_depends_on_what_is_where():
    """And not only by a few hundredths of what never changes: that is learned very slowly."""
    encoder = PositionEncoder(1, 64, 3, 64)
    frames = balls(0, torch.arange(64), frames=1).frames[:, 0]
    with torch.no_grad():
        read = encoder(frames).mean(1)  # [64, 64]
    always = read.mean(0).square().mean().sqrt()
    assert read.std(0).mean() > 0.2 * always


def test_where_there_is_nothing_nothing_is_told():
    encoder = PositionEncoder(1, 16, 2, 8)
    something = torch.zeros(1, 64, 4, 4)
    something[0, :, 1, 2] = torch.randn(64)
    encoder.trunk.forward = lambda _: something
    told = encoder(torch.zeros(1, 1, 16, 16))[0].abs().amax(-1)
    assert told.nonzero().tolist() == [[1 * 4 + 2]]
    trunk = Trunk(1, 3)
    means = trunk(torch.rand(3, 1, 64, 64)).mean((-2, -1))
    torch.testing.assert_close(means, torch.zeros(3, 64), atol=1e-6, rtol=0)


def test_neighbouring_positions_have_like_codes():
    code = position_code(64, 8).detach().flatten(1).T  # [64, 64]
    distance = torch.cdist(code, code)
    assert distance[0, 1] < distance[0, 2] < distance[0, 4]
    assert distance.fill_diagonal_(9).min() > 0.5  # and no two are the same


# --- painters


@pytest.mark.parametrize("painter", PAINTERS)
@pytest.mark.parametrize("frame_size", [8, 24, 64])
@pytest.mark.parametrize("pictures", [0, 1, 3])
def test_sizes_of_pictures(painter, frame_size, pictures):
    paint = PAINTERS[painter](5, 2, frame_size)
    painted = paint(torch.randn(pictures, 5))
    assert painted.shape == (pictures, 2, frame_size, frame_size)
    assert painted.is_contiguous()


def test_patches_are_shuffled_pixels_whatever_the_layout():
    paint = Patches(5, 3, 16).double()
    keep_scale(paint)
    vectors = torch.randn(2, 5, dtype=torch.float64)
    # as one would write it, with positions as neighbours in memory
    cells = paint.widen(vectors)[:, :, None, None].expand(-1, -1, 2, 2).contiguous() + paint.code
    expected = pixel_shuffle(paint.grow(cells), 4)
    torch.testing.assert_close(paint(vectors), expected)
    moved = Patches(5, 3, 16).to(torch.float64, memory_format=torch.channels_last)
    moved.load_state_dict(paint.state_dict())
    torch.testing.assert_close(moved(vectors), expected)
    found = [
        torch.autograd.grad(result.square().sum(), list(network.parameters()))
        for network, result in ((paint, expected), (paint, paint(vectors)), (moved, moved(vectors)))
    ]
    for plain, *others in zip(*found, strict=True):
        for other in others:
            torch.testing.assert_close(other, plain)


def test_channels_of_patches_are_neighbours_in_memory():
    paint = Patches(5, 3, 64)
    seen = channels_last(paint.grow)
    paint(torch.randn(2, 5))
    assert seen == [True] * 2 * len(paint.grow)


# --- likelihoods and the mixture


def test_grey_error_is_the_cross_entropy_of_the_next_frame():
    model = make().eval()
    frames = clips(model.options)
    logits = model(frames[:, :-1]).logits
    expected = binary_cross_entropy_with_logits(logits, frames[:, 1:])
    torch.testing.assert_close(model.loss(frames), expected)


def test_classes_are_predicted_as_probabilities():
    model = make(classes=3).eval()
    frames = clips(model.options)
    for told in (model(frames).frames, model.rollout(frames, 3), model.trace(frames).decoded[2]):
        torch.testing.assert_close(told.sum(-3), torch.ones_like(told.sum(-3)))


def test_mixture_mixes_probabilities():
    logits, mask_logits = torch.randn(2, 4, 3, 5, 5).double(), torch.randn(2, 4, 5, 5).double()
    mixed, masks = mix(logits, mask_logits)
    torch.testing.assert_close(masks, mask_logits.softmax(1))
    torch.testing.assert_close(mixed.sigmoid(), (masks[:, :, None] * logits.sigmoid()).sum(1))
    classes, masks = mix_classes(logits, mask_logits)
    torch.testing.assert_close(masks, mask_logits.softmax(1))
    torch.testing.assert_close(classes.softmax(1), (masks[:, :, None] * logits.softmax(2)).sum(1))
    certain, _ = mix(torch.full((4, 1, 2, 2), 200.0), torch.zeros(4, 2, 2))
    torch.testing.assert_close(certain, torch.full((1, 2, 2), 200.0))


# --- state


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layer", LAYERS)
def test_rollout_goes_on_where_teacher_forcing_stopped(layer, way):
    model = make(model=layer, **WAYS[way]).eval()
    stack = model.options.stack
    frames = clips(model.options)
    forced = model(frames).frames  # number i is frame i + stack
    for watched in (stack, 5, 8):
        future = model.rollout(frames[:, :watched], 3)
        torch.testing.assert_close(future[:, 0], forced[:, watched - stack])
    # the second frame of a rollout is what follows if the first comes true
    whole = torch.cat([frames[:, :5], model.rollout(frames[:, :5], 1)], 1)
    torch.testing.assert_close(model.rollout(frames[:, :5], 2)[:, 1], model(whole).frames[:, -1])


@pytest.mark.parametrize("way", ["stack", "colour", "classes"])
def test_what_is_drawn_is_what_the_next_frame_follows_from(way, monkeypatch):
    model = make(**WAYS[way]).eval()
    frames, drawn = clips(model.options), []

    def draw(logits, generator):
        drawn.append(type(model.likelihood).draw(model.likelihood, logits, generator))
        return drawn[-1]

    def roll(seed):
        return model.rollout(frames, 4, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(roll(0), roll(0))
    assert not torch.equal(roll(0), roll(1))
    monkeypatch.setattr(model.likelihood, "draw", draw)
    told = roll(0)
    assert len(drawn) == 3  # what is drawn of the last, nobody would see
    torch.testing.assert_close(told[:, 0], model.rollout(frames, 1)[:, 0])
    whole = torch.cat([frames, *drawn], 1)
    torch.testing.assert_close(told, model(whole).frames[:, -4:])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_state_goes_on_without_a_gap(layer, way):
    model = make(model=layer, **WAYS[way]).eval()
    frames = clips(model.options)
    whole = model(frames)
    first = model(frames[:, :4])
    second = model(frames[:, 4:], first.state)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole.logits)
    state = model(frames[:, :5]).state
    torch.testing.assert_close(
        model.rollout(frames[:, 5:], 3, state), model.rollout(frames, 3), msg="with a state"
    )


def test_predictions_do_not_see_the_future():
    model = make(stack=2).eval()
    frames = clips(model.options)
    other = frames.clone()
    other[:, 5:] = 1 - other[:, 5:]
    a, b = model(frames).logits, model(other).logits
    torch.testing.assert_close(a[:, :4], b[:, :4])  # of frames 2 to 5, seen up to 4
    assert (a[:, 4] - b[:, 4]).abs().max() > 1e-3


def test_stacked_frames_are_those_of_the_world():
    seen = []
    model = make(stack=3).eval()
    model.encoder.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    frames = clips(model.options)
    state = model(frames[:, :4]).state
    model(frames[:, 4:], state)
    got = torch.cat([part.unflatten(0, (2, -1)) for part in seen], 1)
    torch.testing.assert_close(got, stack_frames(frames, 3))


def test_loss_of_free_frames_is_that_of_a_rollout():
    model = make(stack=2).eval()
    frames = clips(model.options)
    forced = model(frames[:, :4]).frames  # frames 2 to 4
    future = model.rollout(frames[:, :4], 4)  # frames 4 to 7, the first of them as before
    expected = torch.nn.functional.binary_cross_entropy(
        torch.cat([forced[:, :-1], future], 1), frames[:, 2:]
    )
    torch.testing.assert_close(model.loss(frames, free=3), expected)
    assert not torch.isclose(model.loss(frames), expected)


def test_gradients_flow_through_free_frames():
    model = make().eval()
    frames = clips(model.options, frames=3).requires_grad_()
    model.rollout(frames[:, :1], 3)[:, -1].sum().backward()
    assert frames.grad[:, 0].abs().max() > 0
    assert frames.grad[:, 1:].abs().max() == 0


# --- object files have no names


@pytest.mark.parametrize("layer", ["scoff", "scoff-sparse"])
@pytest.mark.parametrize("decoder", ["masks", "attention"])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_object_files_are_exchangeable(layer, decoder, cell):
    model = make(model=layer, decoder=decoder, cell=cell).eval()
    frames = clips(model.options)
    start = model.rnn.initial_state(2)
    order = torch.tensor([2, 0, 1])

    def permuted(h):
        return h.unflatten(-1, (3, -1))[..., order, :].flatten(-2)

    swapped = tuple(map(permuted, start)) if cell == "lstm" else permuted(start)
    before, after = (model.trace(frames, VideoState(h)) for h in (start, swapped))
    torch.testing.assert_close(after.decoded.logits, before.decoded.logits)
    torch.testing.assert_close(after.attention, before.attention[:, :, order])
    torch.testing.assert_close(after.layer.schema, before.layer.schema[:, :, order])
    if decoder == "masks":
        torch.testing.assert_close(after.decoded.masks, before.decoded.masks[:, :, order])
        torch.testing.assert_close(after.decoded.pictures, before.decoded.pictures[:, :, order])
        assert (before.decoded.masks - after.decoded.masks).abs().max() > 1e-4
    torch.testing.assert_close(
        model.rollout(frames, 4, VideoState(swapped)), model.rollout(frames, 4, VideoState(start))
    )


def test_weights_fit_another_number_of_object_files():
    few, many = make(), make(object_files=6, hidden_size=48)
    many.load_state_dict(few.state_dict())
    assert many.rollout(clips(SMALL), 2).shape[1] == 2


# --- trace, noise


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layer", LAYERS)
def test_trace_tells_of_the_same_run(layer, way):
    model = make(model=layer, **WAYS[way]).eval()
    frames = clips(model.options)
    logits, trace = model(frames).logits, model.trace(frames)
    torch.testing.assert_close(trace.decoded.logits, logits)
    steps = logits.shape[1]
    if layer in ("gru", "lstm"):
        assert trace.layer is None
    else:
        assert isinstance(trace.layer, scoff.Trace)
        assert trace.layer.schema.shape == (2, steps, model.options.object_files)
    assert (trace.attention is not None) == (layer in ("scoff", "scoff-sparse", "rims"))
    state = model(frames[:, :5]).state
    torch.testing.assert_close(model.trace(frames[:, 5:], state).decoded.logits, logits[:, -3:])


@pytest.mark.parametrize("changes", [{}, {"colour": True}, {"classes": 3}])
def test_masks_and_pictures_make_the_frame(changes, monkeypatch):
    model = make(**changes).eval()
    if "colour" in changes:  # they mix before they are clamped
        monkeypatch.setattr(model.likelihood, "frames", model.likelihood.means)
    decoded = model.trace(clips(model.options)).decoded
    frame = (decoded.masks[:, :, :, None] * decoded.pictures).sum(2)
    torch.testing.assert_close(frame, model.likelihood.frames(decoded.logits))
    torch.testing.assert_close(decoded.masks.sum(2), torch.ones_like(decoded.masks[:, :, 0]))


def test_training_makes_no_pictures_of_object_files(monkeypatch):
    model, pooled = make(), make(decoder="attention")
    frames = clips(model.options)
    assert pooled.trace(frames).decoded.pictures is None
    monkeypatch.setattr(model.likelihood, "frames", None)  # which cannot be called
    model.loss(frames).backward()
    with pytest.raises(TypeError):
        model.trace(frames)


def test_first_frame_steps_look_again_at_the_first_frame_alone():
    once, thrice = make().eval(), make(first_frame_steps=3).eval()
    thrice.load_state_dict(once.state_dict())
    frames = clips(SMALL)
    again = torch.cat([frames[:, :1], frames[:, :1], frames], 1)
    torch.testing.assert_close(thrice(frames).logits, once(again).logits[:, 2:])


def test_input_noise_is_for_training_alone():
    seen = []
    model = make(input_noise=0.25)
    model.encoder.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    frames = torch.zeros(4, 20, 1, 16, 16, dtype=torch.float64)
    model(frames)
    assert seen[0].mean().item() == pytest.approx(0.25, abs=0.02)
    model.eval()(frames)
    assert seen[1].sum() == 0


def test_dropped_frames_are_blank_in_training_alone_and_never_the_first():
    seen = []
    model = make(drop_frames=0.25, stack=2)
    model.encoder.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    frames = torch.ones(20, 21, 1, 16, 16, dtype=torch.float64)
    state = model(frames).state
    given = seen[0].unflatten(0, (20, 20))  # [N, T, stack, H, W]
    kept = given.flatten(3).mean(3)
    assert set(kept.unique().tolist()) == {0, 1}  # whole frames
    assert torch.equal(kept[:, 1:, 0], kept[:, :-1, 1])  # the same at each step that reads it
    assert (kept[:, 0] == 1).all()
    assert kept[:, 1:, 1].mean().item() == pytest.approx(0.75, abs=0.1)
    # nor what goes on from a state: in a rollout that is what was predicted
    model(frames, state)
    assert seen[1][:, 1].min() == 1
    model.eval()(frames)
    assert seen[2].min() == 1


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("layer", LAYERS)
def test_with_open_gates_what_was_seen_lasts(layer, cell):
    def lasting(bias):
        """How much of the difference between clips is left after some frames that are alike"""
        torch.manual_seed(3)
        model = make(model=layer, cell=cell, keep_bias=bias, communication="none").eval()
        x = torch.zeros(5, 6, *model.encoder(clips(SMALL)[0]).shape[1:], dtype=torch.float64)
        before = model.rnn(torch.randn_like(x))[1]
        after = model.rnn(x, before)[1]
        # of an LSTM's state the part that it keeps
        kept = [part if isinstance(part, torch.Tensor) else part[1] for part in (before, after)]
        spread = [part.std(1).mean() for part in kept]
        return (spread[1] / spread[0]).item()

    assert lasting(8.0) > 1.2 * lasting(0.0)


def test_half_precision_mixes_and_tells_choices_in_single():
    # with several schemata, where two are almost as good the other may be chosen
    model = VideoModel(replace(SMALL, schemata=1)).eval()
    frames = clips(SMALL).float()
    exact = model(frames).logits
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(frames, targets=frames, tell_choices=True)
        assert model.rollout(frames, 3).dtype == torch.float32
    for part in (rounded.logits, rounded.errors, rounded.choices):
        assert part.dtype == torch.float32
    torch.testing.assert_close(rounded.logits, exact, atol=0.03, rtol=0)


# --- schemata by order


@pytest.mark.parametrize("changes", [{}, {"stack": 3}, {"first_frame_steps": 3}, {"cell": "lstm"}])
def test_clips_are_watched_as_often_as_there_are_choices(changes):
    model = make(start="places", **changes).eval()
    frames = clips(model.options)
    n, steps = len(frames), frames.shape[1] - model.options.stack + 1
    choice = torch.randint(2, (3, n, steps, 3))
    every = model(frames, choice=choice.flatten(0, 1), free=2)
    assert len(every.state.recent) == 3 * n
    for number, own in enumerate(choice):
        alone = model(frames, choice=own, free=2)
        part = slice(number * n, (number + 1) * n)
        torch.testing.assert_close(every.logits[part], alone.logits)
    # those of most merit are those it takes by itself
    if "first_frame_steps" not in changes:
        by_itself = model.trace(frames).layer.schema
        torch.testing.assert_close(model(frames, choice=by_itself).logits, model(frames).logits)


def test_noise_decides_on_schemata():
    model = make(first_frame_steps=2).eval()
    frames = clips(SMALL)
    choice = torch.randint(2, (*frames.shape[:2], 3))
    noise = 1e6 * nn.functional.one_hot(choice, 2).to(frames)
    told = model(frames, noise=noise).logits
    torch.testing.assert_close(told, model(frames, choice=choice).logits)


def test_bad_choices_are_refused():
    model, frames = make().eval(), clips(SMALL)
    n, steps = frames.shape[:2]
    with pytest.raises(ValueError, match=f"choice: got {n + 1}, wants a multiple of {n} clips"):
        model(frames, choice=torch.zeros(n + 1, steps, 3, dtype=torch.int64))
    gru = make(model="gru").eval()
    with pytest.raises(ValueError, match="choice: got one, but gru has no schemata"):
        gru(frames, choice=torch.zeros(n, steps, 1, dtype=torch.int64))


# --- sizes


@pytest.mark.parametrize("layer", LAYERS)
def test_parameters_are_counted_without_a_trace(layer):
    model = make(model=layer)
    before = torch.get_rng_state()
    assert count_parameters(model.options) == sum(p.numel() for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("layer", ["gru", "lstm", "rmc", "rims"])
def test_width_for_a_number_of_parameters(layer):
    wanted = count_parameters(VideoOptions())
    matched = match_width(VideoOptions(model=layer), wanted)
    off = abs(count_parameters(matched) - wanted)
    assert off / wanted < (0.07 if layer == "rmc" else 0.02)  # RMC's width comes in steps of 16
    unit = {"rims": 4, "rmc": 16}.get(layer, 1)
    for other in (matched.hidden_size - unit, matched.hidden_size + unit):
        assert abs(count_parameters(replace(matched, hidden_size=other)) - wanted) >= off


def test_no_width_for_too_few_parameters():
    with pytest.raises(ValueError, match="parameters: got 10, wants at least"):
        match_width(replace(SMALL, model="gru"), 10)


# --- errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "transformer"}, "model: got 'transformer', wants one of 'scoff'"),
        ({"decoder": "mask"}, "decoder: got 'mask'"),
        ({"painter": "brush"}, "painter: got 'brush'"),
        ({"map_size": 3}, "map_size: got 3, wants one of 16, 8, 4, 2"),
        ({"frame_size": 20}, "frame_size: got 20, wants a multiple of"),
        ({"stack": 0}, "stack: got 0"),
        ({"input_noise": 2.0}, "input_noise: got 2.0"),
        ({"drop_frames": -0.5}, "drop_frames: got -0.5"),
        ({"doubt": 0.5}, "doubt: got 0.5, wants at least 0 and less than 0.5"),
        ({"doubt": 0.1, "colour": True}, "doubt: got 0.1, wants 0 with colour or classes"),
        ({"keep_bias": float("inf")}, "keep_bias: got inf"),
        ({"features": 6, "decoder": "attention"}, "features: got 6, wants a multiple of"),
        ({"hidden_size": 25}, "hidden_size: got 25, wants a multiple of"),
        ({"classes": 1}, "classes: got 1 with colour = False"),
        ({"classes": 3, "colour": True}, "classes: got 3 with colour = True"),
        ({"classes": -1}, "classes: got -1"),
    ],
)
def test_wrong_options(changes, message):
    with pytest.raises(ValueError, match=message):
        VideoModel(replace(SMALL, **changes))


def test_wrong_frames():
    model = make(stack=3)
    with pytest.raises(ValueError, match=r"frames: got shape \(2, 8, 3, 16, 16\), wants"):
        model(torch.rand(2, 8, 3, 16, 16).double())
    with pytest.raises(ValueError, match=r"frames: got shape \(5, 16, 16\), wants \(N, T, 1, 16"):
        model.loss(torch.rand(5, 16, 16))
    with pytest.raises(ValueError, match="frames: got 0 to 255, wants 0 to 1"):
        model.loss((clips(SMALL) > 0.5).double() * 255)
    with pytest.raises(TypeError, match=r"frames: got torch.uint8, wants numbers from 0 to 1"):
        model.loss(clips(SMALL).byte())
    with pytest.raises(ValueError, match="frames: got 2, wants at least stack = 3"):
        model(clips(SMALL)[:, :2])
    with pytest.raises(ValueError, match="frames: got 4, wants at least 6"):
        model.loss(clips(SMALL)[:, :4], free=2)
    with pytest.raises(ValueError, match="steps: got 0"):
        model.rollout(clips(SMALL), 0)
    with pytest.raises(ValueError, match="targets: got shape"):
        model(clips(SMALL), targets=clips(SMALL))


# --- learning


def moving_squares(n, frames):
    """Squares of 4 x 4 pixels that start anywhere and go right, one pixel a frame"""
    video = torch.zeros(n, frames, 1, 16, 16)
    for clip, (x, y) in enumerate(torch.randint(0, 12 - frames, (n, 2)).tolist()):
        for t in range(frames):
            video[clip, t, 0, y : y + 4, x + t : x + t + 4] = 1
    return video


@pytest.mark.parametrize("decoder", ["masks", "attention"])
def test_it_learns(decoder):
    """Much better than the mean picture, which is the best for a model that sees nothing."""
    model = VideoModel(replace(SMALL, decoder=decoder, features=16))
    frames = moving_squares(16, 5)
    share = frames[:, 1:].mean(0).clamp(1e-6, 1 - 1e-6)
    blind = binary_cross_entropy_with_logits(
        share.logit().expand(16, -1, -1, -1, -1), frames[:, 1:]
    )
    optimiser = torch.optim.Adam(model.parameters(), 5e-3)
    losses = []
    for _ in range(140):
        optimiser.zero_grad()
        loss = model.loss(frames)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    # how fast it goes, and how smoothly, depends on how a processor rounds
    assert min(losses[-20:]) < 0.5 * blind.item()


def test_what_object_files_hold_shows_in_the_picture_from_the_start():
    for painter in PAINTERS:
        model = VideoModel(VideoOptions(painter=painter))
        h = torch.randn(8, 1, 400)
        logits = model.decoder(h).logits
        assert 0.1 < logits.std(0).mean() < 3


@pytest.mark.gpu
def test_a_gpu_takes_patches(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    layer, x = FirstConv2d(3, 16, 4, stride=2, padding=1).cuda(), torch.rand(5, 3, 64, 64).cuda()
    expected = nn.Conv2d.forward(layer, x)
    with torch.autocast("cuda", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        torch.testing.assert_close(layer(x).float(), expected, atol=0.02, rtol=0.02)
    monkeypatch.setattr(nn.Conv2d, "forward", None)  # which cannot be called
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("painter", PAINTERS)
@pytest.mark.parametrize("classes", [0, 3])
def test_a_gpu_sees_and_paints_what_a_cpu_does(painter, classes, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    options = VideoOptions(painter=painter, classes=classes)
    found = []
    frames, output = torch.rand(3, options.channels, 64, 64), torch.randn(2, 2, 400)
    model = VideoModel(options)
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64)):
        model.to(device, dtype).zero_grad()
        seen = model.encoder(frames.to(device, dtype))
        decoded = model.decoder(output.to(device, dtype))
        (seen.square().mean() + decoded.logits.square().mean() + decoded.masks[0].mean()).backward()
        used = [*model.encoder.parameters(), *model.decoder.parameters()]
        gradients = [x.grad.cpu().float().clone() for x in used]
        found.append([*(x.detach().cpu().float() for x in (seen, *decoded)), *gradients])
    for one, other in zip(*found, strict=True):
        scale = max(other.abs().max().item(), 1e-3)
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * scale)


@pytest.mark.gpu
@pytest.mark.parametrize("layer", LAYERS)
def test_loss_and_rollout_inside_a_cuda_graph(layer):
    options = VideoOptions(model=layer, input_noise=0.1, drop_frames=0.2, stack=2)
    model = VideoModel(options).cuda()
    frames = torch.rand(2, 6, 1, 64, 64, device="cuda")

    def work():
        model.zero_grad()
        loss = model.loss(frames, free=2)
        loss.backward()
        with torch.no_grad():
            return loss.detach(), model.rollout(frames, 4)

    graph, (loss, future) = captured(work)
    graph.replay()
    assert loss.isfinite()
    assert future.shape == (2, 4, 1, 64, 64)
    assert future.isfinite().all()
