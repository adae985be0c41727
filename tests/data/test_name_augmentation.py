from hf_deqnar.data.name_augmentation import find_names, replace_names, share_copied, vary_names
from hf_deqnar.data.parallel_text import Pair

CITIES = ["Boston", "Berlin", "Oslo"]
PAIRS = [
    *(Pair(f"Does he live in {city}?", [f"Lebt er in {city}?"]) for city in CITIES),
    *(Pair(f"We saw {person} there.", [f"Wir sahen {person} dort."]) for person in ("Anna", "Tom")),
    Pair("Tom thinks that Anna is in Boston.", ["Tom glaubt, dass Anna in Boston ist."]),
    Pair("The Hand is in Rome.", ["Die Hand ist in Rom."]),
    Pair("My hand hurts.", ["Meine Hand schmerzt."]),
    Pair("Hello, Tom. Tom!", ["Hallo, Tom. Tom!"]),
    Pair("We saw John there.", ["Wir sahen John dort."]),
    *(Pair(f"We {verb} John.", [f"Wir {german} Hans."]) for verb, german in (("know", "kennen"), ("like", "mögen"))),
]


def test_names_are_grouped_by_the_words_before_them():
    names = find_names(PAIRS)
    assert names["in", "in"] == sorted(CITIES)
    assert names["saw", "sahen"] == ["Anna", "Tom"]
    assert names["", ""] == ["Tom"]
    assert not any("Hand" in found for found in names.values()), "also occurs in lower case"
    assert not any("John" in found for found in names.values()), "is translated more often than copied"


def test_a_name_is_replaced_on_both_sides_by_one_that_follows_the_same_words():
    varied = vary_names(PAIRS, share=1.0, seed=3)
    assert [pair.source.count(" in ") for pair in varied] == [pair.source.count(" in ") for pair in PAIRS]
    for old, new in zip(PAIRS[:3], varied[:3], strict=True):
        city = new.source.removeprefix("Does he live in ").removesuffix("?")
        assert city in CITIES
        assert city not in old.source
        assert new.references == [f"Lebt er in {city}?"]
    assert [pair.references for pair in varied[3:5]] == [["Wir sahen Tom dort."], ["Wir sahen Anna dort."]]
    assert varied[5].source in {f"Tom thinks that Anna is in {city}." for city in CITIES[1:]}, (
        "no other name follows the same words"
    )
    assert varied[6:] == PAIRS[6:], "no name, or one that occurs twice"


def test_a_share_of_the_pairs_is_changed_and_the_seed_determines_which():
    pairs = PAIRS[:3] * 100
    varied = vary_names(pairs, share=0.25, seed=1)
    assert varied == vary_names(pairs, share=0.25, seed=1)
    assert varied != vary_names(pairs, share=0.25, seed=2)
    changed = sum(old != new for old, new in zip(pairs, varied, strict=True))
    assert 50 < changed < 100
    assert vary_names(pairs, share=0.0, seed=1) == pairs


def test_share_of_copied_names():
    test = [Pair("Is she in Oslo?", ["Ist sie in Oslo?", "Ist sie denn in Oslo?"]), Pair("Yes.", ["Ja."])]
    (pair,), (name,) = replace_names(test, PAIRS, seed=0)
    assert name in ("Boston", "Berlin")
    assert pair == Pair(f"Is she in {name}?", [f"Ist sie in {name}?"])
    assert share_copied([pair.references[0], "Ist sie in Oslo?", f"{name}er Luft"], [name] * 3) == 1 / 3


def test_listed_names_add_names_that_the_corpus_does_not_have():
    pairs = PAIRS[:3] * 200
    varied = vary_names(pairs, share=0.0, seed=1, list_share=1.0)
    cities = {pair.source.removeprefix("Does he live in ").removesuffix("?") for pair in varied}
    assert len(cities - set(CITIES)) > 50
    assert any(pair.references[0] != pair.source.replace("Does he live", "Lebt er") for pair in varied), (
        "Munich, München"
    )
    assert not cities & {"Anna", "Miller"}, "a place is replaced by places"
    assert vary_names(pairs, share=0.0, seed=1) == pairs
