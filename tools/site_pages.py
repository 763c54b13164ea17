"""A hook of MkDocs: pages of the site that are files outside docs/, with links that lead where they lead on GitHub.

A link in any page is relative to its own file, as everywhere. Here it is looked up in the repository, and written anew
for the site, where README.md is the front page. A link to a file that is no page of the site ends the build.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError  # pyright: ignore[reportMissingImports]
from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "AGENTS.md": "agents.md",
    "benchmarks/README.md": "benchmarks.md",
    "LICENSE": "license.txt",
    "CITATION.cff": "citation.txt",
    "deploy/prometheus.yml": "deploy/prometheus.yml",
    "deploy/grafana.json": "deploy/grafana.json",
}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")


def on_files(files: Any, config: Any) -> Any:
    """Add the files of `PAGES`."""
    for path, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_rest: Any) -> str:
    """Write the links of a page anew."""
    own = next((path for path, name in PAGES.items() if name == page.file.src_uri), f"docs/{page.file.src_uri}")

    def rewrite(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(own), link[1]))
        if path not in PAGES and not path.startswith("docs/"):
            raise PluginError(f"{own} links to {link[1]}, which is no page of the site: add it to PAGES of {__file__}")
        target = PAGES.get(path) or path.removeprefix("docs/")
        return posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".")

    return LINK.sub(rewrite, markdown)
