"""Model architectures: each that `model_config_families` knows is a `Decoder` of some kind of layer."""
