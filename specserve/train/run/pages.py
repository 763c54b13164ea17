"""The parts that the HTML reports share: a page in one file that needs no network (`page.html.j2`), and bars, tables
and charts (`parts.html.j2`)."""

from pathlib import Path
from typing import TYPE_CHECKING

from specserve.train.run.charts import HEIGHT, WIDTH, number

if TYPE_CHECKING:
    import jinja2


def template(folder: Path, name: str) -> "jinja2.Template":
    """Read a template of a folder, which may extend the page and import its parts. Whatever it shows is escaped, and a
    value that nobody gave is an error."""
    import jinja2

    loader = jinja2.FileSystemLoader([folder, Path(__file__).parent])
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"number": number, "grouped": "{:,}".format}
    environment.globals |= {"WIDTH": WIDTH, "HEIGHT": HEIGHT}
    return environment.get_template(name)
