"""The `rockpage` command: one module per subcommand."""
