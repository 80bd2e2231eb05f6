"""From an `nn.Module` to units with sharded parameters, once."""
