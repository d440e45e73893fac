// Empty: Meson precompiles a header for a target, and a target needs a source.
