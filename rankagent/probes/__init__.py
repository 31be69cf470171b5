"""One file per probe. Each says what it writes (`TABLE`), what it costs and what it is blind to."""
