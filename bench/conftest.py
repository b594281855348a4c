"""Options of the benchmark."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-compile", action="store_true", help="leave torch.compile out (its compilations take most of the time)"
    )


@pytest.fixture
def with_compile(request: pytest.FixtureRequest) -> bool:
    return not request.config.getoption("--no-compile")
