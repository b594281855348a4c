"""The command line: `ppo-train demo [--smoke] [--fresh] [key=value ...]`."""

from __future__ import annotations

import argparse
import sys

from ppo_kernels.trainer.config import SMOKE, ConfigError, load

EXAMPLES = """examples:
  ppo-train demo                               film reviews: SFT, reward model, PPO; about five minutes on 2 cores
  ppo-train demo --smoke                       the same on a tiny built-in text, no download, half a minute
  ppo-train demo seed=2 kl.coef=0.1            any setting; all of them are listed in runs/*/config.yaml
  ppo-train demo train.loss_backend=reference  the loss in plain PyTorch instead of the library"""


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 the text could not be fetched, 2 bad command or configuration, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="ppo-train", epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["demo"])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, for example ppo.clip=0.1")
    parser.add_argument("--smoke", action="store_true", help="tiny model, built-in text: a check, not a result")
    parser.add_argument("--fresh", action="store_true", help="train the SFT and the reward model again")
    arguments = parser.parse_intermixed_args(argv)

    try:
        config = load(
            arguments.overrides + (["cache=false"] if arguments.fresh else []), SMOKE if arguments.smoke else None
        )
    except ConfigError as error:
        for problem in error.problems:
            print(f"ppo-train: {problem}", file=sys.stderr)
        return 2

    # Imported late: a mistake in the configuration is reported at once, not after seconds of imports.
    from ppo_kernels.trainer.data import DataError
    from ppo_kernels.trainer.demo import demo

    try:
        demo(config)
    except DataError as error:
        print(f"ppo-train: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ppo-train: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
