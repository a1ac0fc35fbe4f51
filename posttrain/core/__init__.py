"""The nouns that flow through the library: Sample, TokenBatch, TokenScores, LossOutput. Imports torch only."""

__version__ = "0.1.0"
