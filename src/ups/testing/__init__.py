"""What a test of a model, a stage, a reader or a launcher needs; for our tests, benchmarks and plugins."""
