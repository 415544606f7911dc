"""Write the configuration of an nginx that balances requests over all nodes of the live mesh."""

import argparse

from exo_mesh.cli import exit_codes
from exo_mesh.cli.balancing.asking import add_flags, write_config
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.parser import add_api_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the configuration, `--api-url`, `--home`."""
    add_flags(parser)
    add_api_flags(parser, json=False)


def run(args: argparse.Namespace) -> int:
    """Writes the configuration from `GET /state` of the node; --watch calls other members if that node dies."""
    write_config(args, ApiClient(args.api_url, args.home))
    return exit_codes.OK
