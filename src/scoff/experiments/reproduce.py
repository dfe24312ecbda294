"""All runs of an experiment, several at a time, then the comparison with the paper."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from scoff.experiments.base import Experiment, Finished, find_experiment
from scoff.report import RunInfo, Section, Table, write_page
from scoff.training.checkpoint import write_atomic
from scoff.training.devices import pick_device
from scoff.training.errors import ScoffError, StoppedError, UsageError
from scoff.training.logs import SECONDS_BETWEEN_LINES, ProgressStyle, clock
from scoff.training.run import Run, differences
from scoff.training.settings import Settings, flag
from scoff.training.signals import stop_signals

NONE: Mapping[str, str] = {}


@dataclass(frozen=True)
class Plan:
    """One run to be made."""

    path: Path
    config: Settings
    arguments: list[str]
    """Of `scoff train EXPERIMENT`."""
    machine: list[str]
    """Those of them that `--resume` takes too."""


@dataclass
class Job:
    plan: Plan
    process: subprocess.Popen[bytes]
    log: TextIO


def reproduce(
    experiment: Experiment,
    plans: Sequence[Plan],
    out: Path,
    device: str,
    jobs: int | None,
    progress: ProgressStyle,
    arguments: Sequence[str],
    about: str,
) -> None:
    """`about`: what is told of it before it begins."""
    for plan in plans:
        run = Run(plan.path)
        if run.config_path.exists():
            difference = differences(run.read_config(), experiment.name, plan.config)
            if difference:
                raise UsageError(
                    f"{plan.path} already holds another run: {difference}; choose another --out"
                )
    if jobs is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        jobs = 1 if pick_device(device).type == "cuda" else cores or 1
    if jobs < 1:
        raise UsageError(f"--jobs: got {jobs}, wants at least 1")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: cannot write to {out}: {error.strerror}") from error

    if progress != "off":
        print(about, file=sys.stderr, flush=True)
    failed = work_off(experiment.name, plans, device, jobs, Watch(plans, progress))
    done = [plan.path for plan in plans if plan.path.name not in failed]
    if done:
        runs = finished(done)
        commands = ["scoff reproduce " + shlex.join(arguments)]
        write_report(runs, out / "report.html", commands, failed)
        tables = print_tables(runs, failed)
        text = "\n\n".join(table.markdown() for table in tables)
        write_atomic(out / "tables.md", f"`{commands[0]}`\n\n{text}\n".encode())
        print(f"\nReport: {(out / 'report.html').resolve()}")
    if failed:
        raise ScoffError(f"{len(failed)} of {len(plans)} runs failed; see above")


def work_off(
    name: str, plans: Sequence[Plan], device: str, jobs: int, watch: "Watch"
) -> dict[str, str]:
    """Runs each plan in a process of its own; tells which failed, and why."""
    waiting = [plan for plan in plans if not is_done(plan)]
    running: list[Job] = []
    failed: dict[str, str] = {}
    before = {number: signal.signal(number, stop) for number in stop_signals()}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(start(name, waiting.pop(0), device))
            time.sleep(0.2)
            watch.look()
            for job in [j for j in running if j.process.poll() is not None]:
                running.remove(job)
                job.log.close()
                if job.process.returncode:
                    lines = Path(job.log.name).read_text().strip().splitlines()
                    reason = lines[-1].removeprefix("scoff: ") if lines else "no word why"
                    failed[job.plan.path.name] = reason
                    watch.tell(f"{job.plan.path} failed: {reason}")
    finally:
        for job in running:  # when asked to stop: so do they, after saving
            job.process.terminate()
        for job in running:
            job.process.wait()
            job.log.close()
        for number, handler in before.items():
            signal.signal(number, handler)
        watch.close()
    return failed


def is_done(plan: Plan) -> bool:
    evaluation = Run(plan.path).read_evaluation()
    return evaluation is not None and evaluation.get("steps") == plan.config.steps


def stop(number: int, _frame: object) -> None:
    raise StoppedError(
        "stopped; the same command goes on from here", by_keyboard=number == signal.SIGINT
    )


def start(name: str, plan: Plan, device: str) -> Job:
    if Run(plan.path).config_path.exists():
        arguments = ["--resume", str(plan.path), *plan.machine]
    else:
        arguments = [name, *plan.arguments, "--out", str(plan.path)]
    command = [sys.executable, "-m", "scoff", "train", *arguments, "--evaluate"]
    command += ["--device", device, "--progress", "off"]
    log = open(plan.path.with_name(plan.path.name + ".log"), "a")  # noqa: SIM115
    # a session of its own: Ctrl-C reaches this process alone, which then ends the others once
    process = subprocess.Popen(
        command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
    )
    return Job(plan, process, log)


class Watch:
    """Progress of all runs together, from what they log."""

    def __init__(self, plans: Sequence[Plan], style: ProgressStyle):
        if style == "auto":
            style = "bar" if sys.stderr.isatty() else "lines"
        self.plans, self.style = plans, style
        self.total = sum(plan.config.steps for plan in plans)
        self.began = self.told = time.monotonic()
        self.first, _ = self.count()
        self.bar = None
        if style == "bar":
            self.bar = tqdm(total=self.total, initial=self.first, unit="step", smoothing=0.05)

    def count(self) -> tuple[int, str]:
        """Steps done by all, and how those under way do: success, or else loss"""
        steps, told = 0, []
        for plan in self.plans:
            run = Run(plan.path)
            if run.finished:
                steps += plan.config.steps
            elif records := run.read_metrics():
                steps += records[-1]["step"]
                key = (
                    "train/success" if any("train/success" in r for r in records) else "train/loss"
                )
                value = next((r[key] for r in records[::-1] if key in r), None)
                named = f"{plan.path.name} {key.removeprefix('train/')}"
                told.append(f"{named} {value:.3g}" if value is not None else "")
        shown = told[:3] + (["…"] if len(told) > 3 else [])
        return steps, "  ".join(shown)

    def look(self) -> None:
        now = time.monotonic()
        if self.style == "off" or now - self.told < (1 if self.bar else SECONDS_BETWEEN_LINES):
            return
        self.told = now
        steps, losses = self.count()
        if self.bar is not None:
            self.bar.set_postfix_str(losses or "testing", refresh=False)
            self.bar.update(steps - self.bar.n)
            return
        rate = (steps - self.first) / (now - self.began)
        left = clock((self.total - steps) / rate) if rate else "?"
        print(
            f"{steps:,}/{self.total:,} steps  {rate:.1f} steps/s  {left} left  {losses}",
            file=sys.stderr,
            flush=True,
        )

    def tell(self, message: str) -> None:
        tqdm.write(message, file=sys.stderr)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


# --- what came of them


def expand(paths: Sequence[Path]) -> list[Path]:
    """Folders of runs, those inside a folder that is none itself included.

    Files among several paths are passed over: with RESULTS/* a shell names those beside runs too.
    """
    found: list[Path] = []
    for path in paths:
        if len(paths) > 1 and path.is_file():
            continue
        inside = sorted(p.parent for p in path.glob("*/config.json"))
        if (path / "config.json").exists() or not inside:
            found.append(path)
        else:
            found += inside
    if not found:
        raise UsageError("wants the folder of at least one run")
    return found


def untested(paths: Sequence[Path]) -> dict[str, str]:
    """Name of each, and what to do about it."""
    missing = [path for path in paths if Run.open(path).read_evaluation() is None]
    return {path.name: f"not tested: scoff eval {shlex.quote(str(path))}" for path in missing}


def finished(paths: Sequence[Path]) -> list[tuple[Path, dict[str, Any], Finished]]:
    """Folder, config.json and what is in it, of runs that were tested."""
    runs = []
    for path in paths:
        run = Run.open(path)
        held = run.read_config()
        evaluation = run.read_evaluation()
        if evaluation is None:
            continue
        config = find_experiment(held["experiment"]).read_config(held["config"])
        done = Finished(path.name, config, evaluation, run.read_metrics(), path)
        runs.append((path, held, done))
    if not runs:
        raise UsageError(f"none of these was tested yet: scoff eval {paths[0]}")
    names = {held["experiment"] for _, held, _ in runs}
    if len(names) > 1:
        raise UsageError(f"wants runs of one experiment, got {', '.join(sorted(names))}")
    return runs


def sections(
    runs: Sequence[tuple[Path, dict[str, Any], Finished]], failed: Mapping[str, str] = NONE
) -> Sequence[Section]:
    experiment = find_experiment(runs[0][1]["experiment"])
    found = list(experiment.report([done for *_, done in runs]))
    if failed:
        table = Table("Runs that are in none of the tables", ["run", "why"], [*failed.items()])
        found.append(Section("Missing runs", tables=[table]))
    return found


def print_tables(
    runs: Sequence[tuple[Path, dict[str, Any], Finished]], failed: Mapping[str, str] = NONE
) -> list[Table]:
    tables = [table for section in sections(runs, failed) for table in section.tables]
    for table in tables:
        print(f"\n{table.text()}")
    return tables


def write_report(
    runs: Sequence[tuple[Path, dict[str, Any], Finished]],
    path: Path,
    rerun: Sequence[str],
    failed: Mapping[str, str] = NONE,
) -> None:
    experiment = find_experiment(runs[0][1]["experiment"])
    infos = [
        RunInfo(
            name=done.name,
            command=command_of(held),
            config=held["config"],
            environment={
                "training": held["environment"],
                "evaluation": done.evaluation["environment"],
            },
            seconds=done.evaluation["seconds"]["training"],
            parameters=done.evaluation["parameters"],
        )
        for _, held, done in runs
    ]
    lead = experiment.claim
    if len({replace(done.config, seed=0) for _, _, done in runs}) < len(runs):
        lead += " Numbers are means over seeds, and after ± their standard deviation."
    try:
        write_page(
            path,
            title=experiment.title,
            lead=lead,
            sections=sections(runs, failed),
            runs=infos,
            rerun=rerun,
        )
    except OSError as error:
        raise UsageError(f"--out: cannot write {path}: {error.strerror}") from error


def command_of(held: dict[str, Any]) -> str:
    """The shortest command that makes this run."""
    experiment = find_experiment(held["experiment"])
    config = held["config"]
    parts = ["scoff", "train", experiment.name, "--preset", held["preset"]]
    parts += ["--model", config["model"], "--seed", str(config["seed"])]
    chosen = {name: config[name] for name in experiment.defaults_by}
    for name, value in chosen.items():
        parts += ["--" + flag(name), str(value)]
    default = experiment.preset(held["preset"], config["model"], **chosen)
    for name, value in vars(experiment.read_config(config)).items():
        if name in ("model", "seed") or value == getattr(default, name):
            continue
        option = "--" + flag(name)
        if isinstance(value, bool):
            parts.append(option if value else "--no-" + flag(name))
            continue
        parts += [option, *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return shlex.join(parts)


__all__ = ["Plan", "expand", "finished", "print_tables", "reproduce", "sections", "write_report"]
