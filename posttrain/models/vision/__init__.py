"""Images on the model's side: their features, the attention of towers, and the parts of a model that sees."""
