"""From a sequence of vectors to one number or vector: embedding, recurrent layer, readout."""

from typing import Literal, cast

from torch import Tensor, nn

from scoff.nn.readout import Readout
from scoff.nn.recurrent import RecurrentLayer

ReadoutName = Literal["change", "linear", "sum", "attention"]


class SlotLinear(nn.Module):
    """One linear map for all object files, summed over them."""

    def __init__(self, hidden_size: int, output_size: int, num_object_files: int, bias: bool):
        super().__init__()
        self.num_object_files = num_object_files
        self.out = nn.Linear(hidden_size // num_object_files, output_size, bias=bias)

    def forward(self, output: Tensor) -> Tensor:
        """(..., hidden_size) -> (..., output_size)"""
        return self.out(output.unflatten(-1, (self.num_object_files, -1)).sum(-2))


class SequenceRegressor(nn.Module):
    """Reads a sequence and answers after its last element.

    Args:
        input_size: features of an element.
        output_size: size of the answer.
        rnn: a recurrent layer with batch_first.
        num_object_files: slots of its state, 1 for nn.GRU and nn.LSTM.
        readout: "linear", the same map of each object file, summed; "change", that of the
            difference to the initial state, without a bias, so that a state that stands still
            answers 0; "sum", a small network in place of the map; "attention" over the object files
            after that network.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        rnn: nn.Module,
        num_object_files: int,
        readout: ReadoutName,
    ):
        super().__init__()
        hidden_size = cast(int, rnn.hidden_size)
        self.embed = nn.Linear(input_size, cast(int, rnn.input_size))
        self.rnn = rnn
        self.reads_change = readout == "change"
        if readout == "linear" or readout == "change":
            bias = readout == "linear"
            self.read = SlotLinear(hidden_size, output_size, num_object_files, bias)
        else:
            self.read = Readout(hidden_size, output_size, num_object_files, pool=readout)

    def forward(self, x: Tensor) -> Tensor:
        """(N, L, input_size) -> (N, output_size)"""
        # nn.GRU and nn.LSTM start from zero
        start = self.rnn.initial_state(len(x)) if isinstance(self.rnn, RecurrentLayer) else None
        output, _ = self.rnn(self.embed(x), start)
        last = output[:, -1]
        if self.reads_change and start is not None:
            last = last - (start[0] if isinstance(start, tuple) else start)[-1]
        return self.read(last)
