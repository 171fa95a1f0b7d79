"""Pictures from folders and archives: read, split and put in order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from recoup.recipes.flow.data import Images

RANDOM = np.random.default_rng(0)


def noise(*shape):
    return RANDOM.integers(0, 256, shape, dtype=np.uint8)


def write_pictures(folder, arrays, ending="png"):
    for number, array in enumerate(arrays):
        path = Path(folder, "below" if number % 2 else "", f"{number}.{ending}")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(array).save(path)


def rows(images):
    """The pictures of all parts, in an order that does not depend on the split."""
    everything = torch.cat(list(images.parts.values()))
    return sorted(everything.flatten(1).tolist())


def test_the_digits_have_17_levels_and_three_parts():
    images = Images()
    assert images.shape == (1, 8, 8)
    assert images.levels == 17
    assert {part: len(rows) for part, rows in images.parts.items()} == {
        "train": 1437,
        "validation": 180,
        "test": 180,
    }
    assert max(part.max() for part in images.parts.values()) == 16
    assert len({tuple(row) for row in rows(images)}) == 1797


def test_a_folder_with_folders_of_grey_pictures():
    arrays = noise(20, 4, 6)
    write_pictures("grey", arrays)
    Path("grey", "notes.txt").write_text("not a picture")
    Path("grey", ".hidden.png").write_text("not a picture")
    images = Images("grey")
    assert images.shape == (1, 4, 6)
    assert images.levels == 256
    assert rows(images) == sorted(arrays.reshape(20, -1).tolist())


def test_one_picture_in_colour_makes_all_rgb():
    write_pictures("mixed", [*noise(5, 4, 4), noise(4, 4, 3), noise(4, 4, 4)])
    images = Images("mixed")
    assert images.shape == (3, 4, 4)
    grey = [row for part in images.parts.values() for row in part if (row == row[:1]).all()]
    assert len(grey) == 5


def test_pictures_of_several_sizes_are_resized_if_asked():
    write_pictures("sizes", [noise(8, 8), noise(10, 8), noise(20, 20)])
    assert Images("sizes", size=4).shape == (1, 4, 4)


@pytest.mark.parametrize("shape", [(12, 4, 6), (12, 4, 6, 1), (12, 1, 4, 6)])
def test_an_archive_of_grey_pictures(shape):
    array = noise(*shape)
    np.savez("some.npz", images=array, labels=np.arange(12))
    images = Images("some.npz")
    assert images.shape == (1, 4, 6)
    assert rows(images) == sorted(array.reshape(12, -1).tolist())


def test_an_archive_in_colour_with_channels_last():
    array = noise(12, 4, 6, 3)
    np.savez("some.npz", array)
    images = Images("some.npz", size=None)
    assert images.shape == (3, 4, 6)
    assert rows(images) == sorted(array.transpose(0, 3, 1, 2).reshape(12, -1).tolist())


def test_an_archive_may_name_its_parts_and_levels():
    train, test = noise(20, 4, 4) % 5, noise(7, 4, 4) % 5
    np.savez("some.npz", x_train=train, x_test=test, levels=5, y_train=np.arange(20))
    images = Images("some.npz")
    assert images.levels == 5
    assert torch.equal(images.parts["test"][:, 0], torch.from_numpy(test))
    assert len(images.parts["train"]) == 18
    assert images.has_test_part


def test_an_archive_is_resized():
    np.savez("some.npz", images=noise(5, 9, 7, 3))
    assert Images("some.npz", size=4).shape == (3, 4, 4)


def test_fewer_levels_merge_neighbours():
    np.savez("some.npz", images=np.arange(256, dtype=np.uint8).reshape(16, 4, 4))
    images = Images("some.npz", levels=4)
    assert sorted(value for row in rows(images) for value in row) == sorted(
        64 * [0] + 64 * [1] + 64 * [2] + 64 * [3]
    )


def test_the_order_of_an_epoch_depends_on_the_seed_and_the_epoch_alone():
    def order(seed, epoch):
        loader = Images(batch_size=100, seed=seed).train_dataloader()
        loader.sampler.set_epoch(epoch)
        return torch.cat(list(loader)).flatten(1)

    first = order(0, 3)
    torch.rand(1)
    assert torch.equal(first, order(0, 3))
    assert not torch.equal(first, order(0, 4))
    assert not torch.equal(first, order(1, 3))
    assert sorted(first.tolist()) == sorted(Images().parts["train"].flatten(1).tolist())


def test_batches_are_rows_of_one_tensor():
    batches = list(Images(batch_size=100).val_dataloader())
    assert [len(batch) for batch in batches] == [100, 80]
    assert batches[0].dtype == torch.uint8
    assert torch.equal(torch.cat(batches), Images().parts["validation"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": 1}, "`levels` is 1"),
        ({"levels": 18}, "`levels` is 18, but the pictures have 17"),
        ({"batch_size": 0}, "`batch_size` is 0"),
        ({"size": 1}, "`size` is 1"),
        ({"size": 16}, "17 grey levels, which resizing would blur"),
        ({"validation_fraction": 0.0}, "between 0 and 1"),
        ({"validation_fraction": 0.6, "test_fraction": 0.9}, "smaller"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    if message == "smaller":
        np.savez("few.npz", images=noise(2, 4, 4))
        options = {**options, "path": "few.npz"}
    with pytest.raises(ValueError, match=message):
        Images(**options)


@pytest.mark.parametrize("name", ["moons", "rings", "checkerboard"])
def test_toy_densities_are_the_same_points_each_time(name):
    points = Images(name, seed=1)
    assert points.shape == (2,)
    assert points.levels is None
    assert {part: len(rows) for part, rows in points.parts.items()} == {
        "train": 16000,
        "validation": 2000,
        "test": 2000,
    }
    everything = torch.cat(list(points.parts.values()))
    assert everything.dtype == torch.float32
    assert everything.abs().max() < 4.5
    assert everything.std(0).min() > 0.9
    torch.rand(3)
    again = torch.cat(list(Images(name, seed=2).parts.values()))
    assert torch.equal(everything, again)


def test_rings_and_checkerboard_are_where_they_should_be():
    rings = Images("rings", conditional=True)
    radius = rings.parts["test"].norm(dim=1)
    assert ((radius - (rings.labels["test"] + 1)).abs() < 0.5).all()
    assert rings.num_classes == 3
    board = (Images("checkerboard").parts["test"] / 2).floor().long()
    assert ((board.sum(1) % 2) == 0).all()
    assert board.unique(dim=0).shape == (8, 2)


def test_a_folder_may_have_the_name_of_a_toy():
    write_pictures("moons", noise(5, 4, 4))
    assert Images("./moons").shape == (1, 4, 4)
    assert Images("moons").shape == (2,)


def test_labels_go_with_their_pictures_into_every_part():
    array = np.arange(30, dtype=np.uint8)[:, None, None].repeat(4, 1).repeat(4, 2)
    np.savez("some.npz", x_train=array, y_train=np.arange(30) % 7)
    images = Images("some.npz", conditional=True, batch_size=8)
    assert images.num_classes == 7
    for part, rows in images.parts.items():
        assert torch.equal(rows[:, 0, 0, 0].long() % 7, images.labels[part])
    for loader in (images.train_dataloader(), images.val_dataloader(), images.test_dataloader()):
        for x, labels in loader:
            assert torch.equal(x[:, 0, 0, 0].long() % 7, labels)
    images.test_on_everything()
    assert torch.equal(images.parts["test"][:, 0, 0, 0].long() % 7, images.labels["test"])


def test_labels_of_parts_that_the_data_name():
    train, test = noise(20, 4, 4), noise(7, 4, 4)
    arrays = {"train_images": train, "test_images": test, "train_labels": np.arange(20) % 3}
    np.savez("some.npz", **arrays, test_labels=np.arange(7, dtype=np.uint8) % 5)
    images = Images("some.npz", conditional=True)
    assert torch.equal(images.labels["test"], torch.arange(7) % 5)
    assert images.num_classes == 5
    assert Images("some.npz").num_classes is None
    assert isinstance(next(iter(Images("some.npz").val_dataloader())), torch.Tensor)


def test_the_digits_have_labels():
    images = Images(conditional=True)
    assert images.num_classes == 10
    assert images.labels["train"].bincount().min() > 100


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "has no label for each picture of its train part"),
        ({"y_train": np.arange(9)}, "of its train part"),
        ({"y_train": np.arange(20.0)}, "of its train part"),
        ({"y_train": np.arange(20)}, "of its test part"),
        ({"y_train": np.arange(20) - 1, "y_test": np.arange(7)}, "hold -1, but classes are"),
    ],
)
def test_labels_that_are_none(arrays, message):
    np.savez("some.npz", x_train=noise(20, 4, 4), x_test=noise(7, 4, 4), **arrays)
    assert Images("some.npz").shape == (1, 4, 4)
    with pytest.raises(ValueError, match=message):
        Images("some.npz", conditional=True)


# -- points of one's own ---------------------------------------------------------------------------


def cloud(num=40, num_columns=2):
    return np.random.default_rng(1).normal(3.0, 200.0, (num, num_columns))


@pytest.mark.parametrize(
    "header", ["", "# a comment\n\n", "x,y\n", "# a comment\nlongitude , latitude\n"]
)
def test_points_of_a_csv(header):
    points = cloud()
    rows = "".join(f"{x!r}, {y!r}\n" for x, y in points.tolist())
    Path("own.csv").write_text(header + rows, encoding="utf-8-sig")
    found = Images("own.csv")
    assert (found.shape, found.levels, found.num_classes) == ((2,), None, None)
    everything = torch.cat(list(found.parts.values()))
    assert everything.dtype == torch.float32
    assert sorted(everything.tolist()) == sorted(torch.tensor(points).float().tolist())
    assert found.state_dict() == {"path": str(Path("own.csv").resolve())}


def test_a_third_column_has_the_labels():
    points, labels = cloud(), np.arange(40) % 3
    points[:, 0] = labels * 100 + np.arange(40) / 100
    np.savetxt("own.csv", np.column_stack([points, labels]), delimiter=",")
    found = Images("own.csv", conditional=True)
    assert found.num_classes == 3
    for part, rows in found.parts.items():
        assert torch.equal((rows[:, 0] / 100).round().long(), found.labels[part])
    assert Images("own.csv").parts["train"].shape == (32, 2)


def test_points_of_an_archive():
    points, labels = cloud(), np.arange(40) % 3
    np.savez("one.npz", points)
    np.savez("own.npz", points=points.astype(np.float32), labels=labels)
    np.savez("parts.npz", train_points=points, test_points=points[:7], test_labels=labels[:7])
    for name in ("one.npz", "own.npz"):
        assert Images(name).shape == (2,)
        everything = torch.cat(list(Images(name).parts.values()))
        assert sorted(everything.tolist()) == sorted(torch.tensor(points).float().tolist())
    assert Images("own.npz", conditional=True).num_classes == 3
    parts = Images("parts.npz")
    assert parts.levels is None
    assert parts.has_test_part
    assert torch.equal(parts.parts["test"], torch.tensor(points[:7]).float())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "own.csv cannot be read as numbers with commas"),
        ("x,y\n", "cannot be read as numbers with commas"),
        ("1,2\n3,four\n", "cannot be read .*'four'.*row"),
        ("1;2\n3;4\n", "cannot be read as numbers with commas"),
        ("1,2\n3\n", "cannot be read .*columns"),
        ("1,2,3,4\n2,3,4,5\n", "has 4 columns, but must have two"),
        ("1\n2\n", "has 1 columns"),
        ("1,2\n3,nan\n", r"holds \[3.0, nan\] as point 2"),
        ("1,2\n3,inf\n", r"holds \[3.0, inf\] as point 2"),
        ("1,7\n2,7\n", "Column 2 of own.csv is 7 but for a spread of 0"),
        ("1700000001,1\n1700000009,2\n", "Column 1 of own.csv is 1.7e.09 but for a spread of 4"),
        ("1,2,0\n2,3,0.5\n", "third column of own.csv holds 0.5, but labels are whole"),
    ],
)
def test_a_csv_that_is_none(text, message):
    Path("own.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        Images("own.csv")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"points": np.ones((9, 3))}, r"`points` of own.npz has shape \(9, 3\)"),
        ({"points": np.ones((9, 2), dtype=bool)}, "type bool"),
        (
            {"points": cloud(), "x_test": noise(7, 4, 4)},
            r"`x_test` of own.npz has shape \(7, 4, 4\)",
        ),
    ],
)
def test_an_archive_of_points_that_is_none(arrays, message):
    np.savez("own.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        Images("own.npz")


@pytest.mark.parametrize("option", ["size", "levels"])
def test_points_have_neither_pixels_nor_grey_levels(option):
    np.savetxt("own.csv", cloud(), delimiter=",")
    for name in ("own.csv", "moons"):
        with pytest.raises(ValueError, match=f"`{option}` is 8, but {name} are points"):
            Images(name, **{option: 8})


def test_too_few_points_are_called_points():
    Path("own.csv").write_text("1,2\n2,4\n")
    with pytest.raises(ValueError, match=r"own\.csv has 2 points, and none are left"):
        Images("own.csv", validation_fraction=0.6, test_fraction=0.9)
