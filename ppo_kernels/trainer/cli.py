"""The command line: `ppo-train demo [--smoke] [--fresh] [key=value ...]`."""

from __future__ import annotations

import argparse
import sys

EXAMPLES = """examples:
  ppo-train demo                               film reviews: SFT, reward model, PPO; about five minutes on 2 cores
  ppo-train demo --smoke                       the same on a tiny built-in text, no download, half a minute
  ppo-train demo seed=2 kl.coef=0.1            any setting; all of them are listed in runs/*/config.yaml
  ppo-train demo train.loss_backend=reference  the loss in plain PyTorch instead of the library"""


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 text or a package is missing, 2 bad command or configuration, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="ppo-train", epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["demo"])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, for example ppo.clip=0.1")
    parser.add_argument("--smoke", action="store_true", help="tiny model, built-in text: a check, not a result")
    parser.add_argument("--fresh", action="store_true", help="train the SFT and the reward model again")
    arguments = parser.parse_intermixed_args(argv)

    # Imported here and in this order: a mistake in the configuration is reported before seconds of imports.
    try:
        from ppo_kernels.trainer.config import SMOKE, ConfigError, load

        overrides = arguments.overrides + (["cache=false"] if arguments.fresh else [])
        try:
            config = load(overrides, SMOKE if arguments.smoke else None)
        except ConfigError as error:
            return _fail(2, *error.problems)

        from ppo_kernels.trainer.data import DataError
        from ppo_kernels.trainer.demo import demo
    except ModuleNotFoundError as error:
        return _fail(
            1, f"the package {error.name} is missing; install the trainer with: pip install 'ppo_kernels[train]'"
        )

    try:
        demo(config)
    except DataError as error:
        return _fail(1, str(error))
    except KeyboardInterrupt:
        return _fail(130, "interrupted")
    return 0


def _fail(code: int, *problems: str) -> int:
    for problem in problems:
        print(f"ppo-train: {problem}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
