"""Our stages in the pipelines of others. Each needs its own package, which ups does not bring along."""
