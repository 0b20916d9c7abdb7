"""What all studies share: settings, presets, runs that resume, and cells that are kept."""
