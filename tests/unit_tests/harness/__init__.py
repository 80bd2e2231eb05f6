"""Tools shared by the tests: rank pools, simulated ranks, a reference loop and small models."""
