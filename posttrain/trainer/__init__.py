"""BaseTrainer on transformers.Trainer: options, metrics, optimizer, exact checkpoints. The only layer that imports Trainer."""
