"""The subcommands of `tbo timeline`, each with the four names of `tbo.cli.Subcommand`."""
