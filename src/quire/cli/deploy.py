"""`quire deploy`: run an application in a cluster, or write its configuration."""

from __future__ import annotations

import argparse
from pathlib import Path

from quire.cli.flags import config_from, given_fields
from quire.cli.serve import options_from
from quire.deploy.serve_config import DeployOptions, serve_config
from quire.errors import StartupError


def deploy(args: argparse.Namespace) -> int:
    """Run the application of Ray Serve, or write its configuration."""
    options = DeployOptions(**given_fields(args, DeployOptions))
    config, serving = config_from(args), options_from(args)
    if options.write is None:
        from quire.deploy.run import run

        return run(config, serving, options, lambda line: print(line, flush=True))
    import yaml

    text = yaml.safe_dump(serve_config(config, serving, options), sort_keys=False)
    try:
        Path(options.write).write_text(text)
    except OSError as error:
        raise StartupError(f"--write {options.write[:200]} can't be written: {error.strerror}") from error
    return 0
