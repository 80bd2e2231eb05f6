"""DTensors over uneven shards: their layout, chunk metadata, and exchange between ranks."""
