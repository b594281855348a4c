"""The command line: `ppo-train config.yaml [key=value ...]`, `ppo-train demo`, `ppo-train --resume runs/name`."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from pathlib import Path
from typing import Any

PRESETS = Path(__file__).parent / "presets"
EXAMPLES = """examples:
  ppo-train demo                          film reviews: SFT, reward model, PPO; about five minutes on 2 cores
  ppo-train demo --smoke                  the same on a tiny built-in text, no download, half a minute
  ppo-train config.yaml optim.actor_lr=1e-6 seed=2
  ppo-train smollm-arithmetic             a preset: a real model of 135M parameters learns sums, on a CPU
  ppo-train config.yaml --check           validate, show the plan of batches and memory, make one update; save nothing
  ppo-train --resume runs/demo            go on where it stopped, however it stopped
  torchrun --nproc_per_node 8 -m ppo_kernels.trainer config.yaml

exit codes: 0 done, 1 text or a package is missing, 2 bad command or configuration, 3 diverged and rollbacks used up,
4 no usable checkpoint, 5 disk full, 75 asked to end (SIGTERM, SIGINT, SIGUSR1): saved, go on with --resume"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="ppo-train", epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", help="a YAML file, a preset, or demo")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, for example ppo.clip=0.1")
    parser.add_argument("--resume", metavar="RUN", help="a run's folder")
    parser.add_argument("--check", action="store_true", help="validate, plan, make one update and throw it away")
    parser.add_argument("--smoke", action="store_true", help="demo: tiny model, built-in text: a check, not a result")
    parser.add_argument("--fresh", action="store_true", help="demo: train the SFT and the reward model again")
    arguments = parser.parse_intermixed_args(argv)

    # Imported here and in this order: a mistake in the configuration is reported before seconds of imports.
    try:
        from ppo_kernels.trainer.settings import ConfigError

        try:
            config, folder = _configuration(arguments)
        except ConfigError as error:
            from ppo_kernels.trainer import preflight

            return say(
                2,
                error.problems
                + (preflight.problems(error.rest, ranks=1) if error.rest and not error.rest.demo else []),
            )
        from ppo_kernels.trainer.launch import launch
    except ModuleNotFoundError as error:
        remedy = "install the trainer with: pip install 'ppo_kernels[train]'"
        return say(1, [f"the package {error.name} is missing; {remedy}"])
    code, problems = launch(config, folder, check=arguments.check)
    return say(code, problems)


def _configuration(arguments: argparse.Namespace) -> tuple[Any, Path | None]:
    """The configuration, and the folder of the run to go on with."""
    from ppo_kernels.trainer.settings import DEMO, SMOKE, ConfigError, load, read_file, resumed

    overrides = list(arguments.overrides)
    if arguments.resume is not None:
        if arguments.config:  # with --resume every other word is an override
            overrides.insert(0, arguments.config)
        folder = Path(arguments.resume)
        if not (folder / "config.yaml").is_file():
            raise ConfigError([f"--resume {folder}: not a run, config.yaml is missing"])
        return resumed(read_file(folder / "config.yaml"), overrides), folder
    if arguments.config is None:
        raise ConfigError(["expected a YAML file, a preset, or demo; ppo-train --help shows examples"])
    if arguments.config == "demo":
        fresh = ["demo.cache=false"] if arguments.fresh else []
        return load(overrides + fresh, SMOKE if arguments.smoke else DEMO), None
    if arguments.smoke or arguments.fresh:
        raise ConfigError(["--smoke and --fresh belong to ppo-train demo"])
    if "=" in arguments.config:
        raise ConfigError([f"expected a YAML file, a preset or demo before {arguments.config}"])
    path = Path(arguments.config)
    if not path.exists() and path.suffix == "":
        path = PRESETS / f"{arguments.config}.yaml"
    if not path.is_file():
        names = ["demo", *sorted(preset.stem for preset in PRESETS.glob("*.yaml"))]
        close = difflib.get_close_matches(arguments.config, names, 1, 0.5)
        hint = f"; did you mean {close[0]}?" if close else f"; the presets are {', '.join(names)}"
        raise ConfigError([f"{arguments.config}: no such file{hint}"])
    return load(overrides, {"name": path.stem, **read_file(path)}), None


def say(code: int, problems: list[str]) -> int:
    """Prints the problems to stderr; returns the code."""
    for stream, lines in ((sys.stderr, problems), (sys.stdout, [])):
        try:
            for line in lines:
                print(f"ppo-train: {line}", file=stream)
            stream.flush()
        except OSError:  # the disk is full, or nobody reads any more: Python would try again, and end with 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code


if __name__ == "__main__":
    sys.exit(main())
