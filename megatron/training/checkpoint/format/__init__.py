"""The format on disk: paths, manifest, integrity, safe reading."""
