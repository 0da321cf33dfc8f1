"""What a Python program uses: `import ups` finds its public names here, on first use."""
