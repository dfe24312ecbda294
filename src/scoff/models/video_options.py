"""What a video model is made of."""

from dataclasses import dataclass
from typing import Literal

from scoff.models.pictures import HALVINGS, PAINTERS, PainterName
from scoff.nn.checks import check_choice, check_divides, check_finite, check_rate, check_size
from scoff.ops.scoff import Backend

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
    doubt: float = 0.0
    """How far from 0 and 1 predictions of grey pixels stay at least, so that who is sure of what is
    wrong pays a bounded price."""
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
        for name in ("keep_bias", "attention_scale", "initial_std"):
            check_finite(name, getattr(self, name))
        if self.initial_std < 0:
            raise ValueError(f"initial_std: got {self.initial_std}, wants at least 0")
        check_size("classes", self.classes, least=0)
        if self.classes == 1 or (self.classes and self.colour):
            got = f"{self.classes} with colour = {self.colour}"
            raise ValueError(f"classes: got {got}, wants two or more without colour, or 0")
        if not 0 <= self.doubt < 0.5:
            raise ValueError(f"doubt: got {self.doubt}, wants at least 0 and less than 0.5")
        if self.doubt and (self.colour or self.classes):
            raise ValueError(f"doubt: got {self.doubt}, wants 0 with colour or classes")
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
