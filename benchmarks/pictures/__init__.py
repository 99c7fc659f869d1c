"""Pictures of README and the pages, as SVG that is the same text on every machine."""
