"""Measuring a server that runs this path: SGLang's own client, two sides, alternated order."""
