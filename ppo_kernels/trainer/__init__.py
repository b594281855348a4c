"""The reference PPO trainer: SFT, reward model and PPO on one machine, in files that each read alone.

Start with ``loop.py``, which is the algorithm on one page.
"""
