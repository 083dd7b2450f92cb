"""The ranks' loops over one loader, and the items that they share out."""

from collections import Counter
from itertools import zip_longest


def loops(ranks, train):
    """Yield (line, number, loops, items) of each loop over a loader.

    loops: the loop of each rank; items: the set that they share out, or None if each
    rank has its own set.
    """
    known = [e for r in ranks for e in r.epochs]
    training = {e.key for e in known if e.trains}
    # One that was stopped before its first step looks like an evaluation.
    known = [e for e in known if e.trains or e.whole or e.key not in training]
    for key in dict.fromkeys(e.key for e in known if e.trains == train):
        chosen = {id(e) for e in known if e.key == key and e.trains == train}
        of_all = [[e for e in r.epochs if id(e) in chosen] for r in ranks]
        for number, group in enumerate(zip_longest(*of_all), start=1):
            group = [e for e in group if e]
            yield group[0].line, number, group, items_to_share(group)


def items_to_share(group):
    levels = [*zip(*(e.sets for e in group), strict=False)]
    for number, sets in enumerate(levels, start=1):
        if all(s == sets[0] for s in sets):
            return sets[0]
        # Subsets are shards if they are disjoint, but for what fills them up.
        union = set.union(*sets)
        if sum(map(len, sets)) - len(union) >= len(group):
            return None
        if number == len(levels) - 1:  # the rest may be there for another purpose
            return union
    return None


def count(group, items):
    """Return how many items were repeated, and how many left out."""
    dealt = Counter(i for e in group for i in e.items)
    return dealt.total() - len(dealt), len(items - dealt.keys())


def auxiliary(all_loops, group):
    """Return loops over the rest of the same data set, without steps in between."""
    first, dealt, added = group[0], {i for e in group for i in e.items}, []
    for _, _, others, _ in all_loops:
        for e in others:
            same_time = (e.base, e.first) == (first.base, first.first)
            if same_time and not dealt & {*e.items}:
                dealt |= {*e.items}
                added.append(e)
    return added
