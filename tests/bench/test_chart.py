import pytest

from kvferry.bench.chart import draw, require_chart
from kvferry_plugins.errors import ConfigError

PNG = b"\x89PNG\r\n"


@pytest.fixture
def measurements(measured):
    return [
        measured(raw={"way": 1.0}, against={"NIXL": {"polled": 2.0}}, blocks=blocks, backend=backend)
        for backend in ("MPI", "UCX")
        for blocks in (1, 16, 256)
    ]


def test_it_names_every_line_and_both_units(measurements, tmp_path):
    draw(measurements, tmp_path / "chart.svg")
    text = (tmp_path / "chart.svg").read_text()
    for label in ("kvferry, in order", "kvferry, shuffled", "raw, way", "raw NIXL, polled", "memcpy"):
        assert label in text
    for label in ("CPP over MPI", "CPP over UCX", "GB/s", "blocks", "256"):
        assert label in text


def test_a_single_measurement_can_be_drawn_too(measured, tmp_path):
    draw([measured()], tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("name", ["chart", "chart.pdf", "chart.png/chart.png"])
def test_a_file_that_cannot_be_written_is_refused(name, tmp_path):
    with pytest.raises(ConfigError):
        require_chart(tmp_path / name)


@pytest.mark.parametrize("backends", [("MPI",), ("MPI", "NIXL", "UCX")])
def test_the_title_is_no_wider_than_the_panels(measured, backends, monkeypatch, tmp_path):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: drawn.append(figure))
    draw([measured(backend=backend) for backend in backends], tmp_path / "chart.png")
    title = drawn[0].texts[0].get_window_extent()
    assert title.x0 >= 0
    assert title.x1 <= drawn[0].bbox.x1


def test_panels_share_an_axis_that_cuts_no_line_off(measured, monkeypatch, tmp_path):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: drawn.append(figure))
    draw([measured(backend="MPI"), measured(memcpy=1e-9)], tmp_path / "chart.png")
    for axis in drawn[0].axes:
        assert axis.get_ylim()[0] == 0
        assert axis.get_ylim()[1] > 1e-6 / 1e-9
