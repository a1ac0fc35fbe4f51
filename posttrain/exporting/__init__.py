"""A trained model in other people's formats, compared with what was trained before it is handed out."""
