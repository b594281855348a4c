"""A tiny film-review language of our own, for tests and `ppo-train demo --smoke`: no download, known ratings."""

from __future__ import annotations

import random

WHOSE = ["the", "this", "that", "her", "his", "their", "our", "every", "one"]
WHAT = [
    "film", "movie", "story", "cast", "ending", "music", "script", "plot", "hero", "villain", "scene", "comedy",
    "drama", "song", "picture", "camera", "joke", "dialogue", "romance", "finale", "opening", "sequel", "chapter",
]  # fmt: skip
LINKS = ["is", "was", "seems", "feels", "looks", "stays"]
DEGREES = ["", "very ", "really ", "quite "]
MOODS = {
    "wonderful": 3.2, "great": 2.9, "charming": 2.4, "funny": 2.0, "good": 1.9, "clever": 1.8,
    "quiet": 0.1, "short": 0.0, "long": -0.2,
    "slow": -0.9, "sad": -1.5, "dull": -1.8, "boring": -2.1, "bad": -2.4, "awful": -3.0, "terrible": -3.2,
}  # fmt: skip
TAILS = ["from start to end", "for the whole family", "as we hoped", "in every scene", "and then it stops"]


def toy_snippets(seed: int, count: int) -> list[tuple[str, float]]:
    """`count` (text, rating in [-4, 4]) pairs, the same for the same seed."""
    rng = random.Random(seed)
    snippets = []
    for _ in range(count):
        first, second = rng.sample(list(MOODS), 2)
        text = f"{rng.choice(WHOSE)} {rng.choice(WHAT)} {rng.choice(LINKS)} {rng.choice(DEGREES)}{first} and {second}"
        if rng.random() < 0.3:
            text += f" {rng.choice(TAILS)}"
        rating = (MOODS[first] + MOODS[second]) / 2 + rng.gauss(0, 0.3)
        snippets.append((text + ".", max(-4.0, min(4.0, rating))))
    return snippets
