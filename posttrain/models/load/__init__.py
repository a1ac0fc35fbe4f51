"""Models as they are loaded, adapted, frozen as references and exported."""
