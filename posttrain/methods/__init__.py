"""One small file per method: its options, its row format, its loss. `table.METHODS` lists them all."""
