import pytest
from docs.pages import name_of, pages_of


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", pages_of("extend"), ids=name_of)
def test_every_block_of_the_page_does_what_it_says(page, run):
    run(page)
