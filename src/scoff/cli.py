"""The `scoff` command."""

import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from scoff.commands.arguments import meant, parse
from scoff.commands.bench import bench
from scoff.commands.data import data
from scoff.commands.evaluate import eval_runs
from scoff.commands.report import export, report
from scoff.commands.reproduce import reproduce
from scoff.commands.train import train
from scoff.training.errors import ScoffError, UsageError

USAGE = """\
usage: scoff COMMAND ...

  scoff list                          experiments, their models and presets
  scoff train EXPERIMENT [options]    train a model; scoff train EXPERIMENT --help for the options
  scoff train --resume RUN            go on with a run that was stopped
  scoff eval RUN...                   test trained models
  scoff eval RUN... --data FOLDER     judge movies of IntPhys, write answer.txt
  scoff eval RUN... --data FILE.h5    test on a file of bouncing balls
  scoff reproduce EXPERIMENT          train and test all models, compare with the paper
  scoff report RUN...                 one HTML page about trained and tested models
  scoff report --pretrained NAME      the same about models that come with the package
  scoff export RUN... --name NAME     put trained and tested models into the package
  scoff bench                         speed of the layers against torch's own
  scoff data balls --out FILE.h5      write clips of bouncing balls
  scoff data intphys --out FOLDER     write movies of possible and impossible physics
  scoff data intphys-cache FOLDER     make such, or the real ones, ready for training

Each command explains itself with --help."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    args = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may not know all characters
            stream.reconfigure(errors="replace")
    logging.basicConfig(format="scoff: %(message)s", level=logging.INFO)
    for noisy in ("lightning_fabric", "lightning.fabric", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        run_command(args)
    except ScoffError as error:
        print(f"scoff: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of a pipe, such as head, has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    sys.exit(0)


def run_command(args: list[str]) -> None:
    if not args or args[0] in ("-h", "--help", "help"):
        print(USAGE)
        return
    if args[0] == "--version":
        import scoff

        print(scoff.__version__)
        return
    command = COMMANDS.get(args[0])
    if command is None:
        raise UsageError(
            f"there is no command {args[0]!r}{meant(args[0], COMMANDS)}; there are: "
            + ", ".join(COMMANDS)
        )
    command(args[1:])


@dataclass(frozen=True)
class List:
    """Lists the experiments, their models and presets."""


def list_experiments(args: list[str]) -> None:
    parse(List, args, "scoff list")
    from scoff.experiments import NAMES, find_experiment

    for name in NAMES:
        experiment = find_experiment(name)
        print(f"{name}\n  {experiment.summary}\n  models:  {', '.join(experiment.models)}")
        width = max(map(len, experiment.presets))
        for key, preset in experiment.presets.items():
            print(f"  preset:  {key:<{width}}  {preset.summary}")
            compared = f"{', '.join(preset.models)}; seeds: {preset.seeds}"
            print(f"           {'':{width}}  reproduce compares {compared}")
            for option, values in preset.grid.items():
                print(f"           {'':{width}}  with {option}: {', '.join(values)}")
    from scoff.pretrained import names

    print(f"trained models in the package, for scoff report --pretrained: {', '.join(names())}")


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "list": list_experiments,
    "train": train,
    "eval": eval_runs,
    "reproduce": reproduce,
    "report": report,
    "export": export,
    "bench": bench,
    "data": data,
}
