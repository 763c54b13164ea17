"""What a chart says can be read."""

import pytest

from specserve.train.run import charts
from specserve.train.run.charts import ChartLine, line_chart


@pytest.mark.parametrize("scale", [1.5e-5, 1.0, -1.25e-5])
def test_the_widest_label_fits_its_margin(scale: float) -> None:
    chart = line_chart("t", "step", [ChartLine("a", ((0.0, 0.0), (9.0, scale)))])
    assert chart is not None
    assert max(len(label) for _, label in chart.y_ticks) * charts.LETTER <= chart.left - charts.GAP
    assert chart.lines[0].path.startswith(f"M{chart.left:.1f} ")
    assert (chart.left == charts.LEFT) == (scale == 1)
