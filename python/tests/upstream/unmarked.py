"""A pytest plugin: modules that are marked to be run by hand are run."""


def pytest_collection_modifyitems(items):
    for item in items:
        for node in item.listchain():
            node.own_markers = [m for m in node.own_markers if m.name != "skip"]
