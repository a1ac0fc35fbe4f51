"""Rewards as a runtime: functions, async functions and models, judged beside generation, in processes that may die.

Nothing is imported here: `python -m posttrain.rewards.worker` starts by importing this package, and must start at once.
"""
