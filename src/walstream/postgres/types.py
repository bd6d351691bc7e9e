"""What a PostgreSQL type becomes in JSON: the kind of every type, built in or not.

Owns the list of built-in types and the rules for the others; refuses to know how a kind is written (the envelope does
that) and how facts about a type are fetched (catalogue.py). Values are PostgreSQL's text under the pinned settings of
session.py, and the kinds hold under those settings only: money, for one, is plain because lc_monetary is C.

    domain      the kind of its base type             array       ARRAY of its element's kind
    enum        STRING, labels may hold anything      composite   STRING, PostgreSQL's row text
    range       STRING, bounds may be quoted          extension   STRING
    unknown     STRING, which is right for all of them and only slower

PLAIN is a promise: no value of the type has a quote, a backslash or a control character in its text. Sans-IO.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Final, NamedTuple

NO_MODIFIER: Final = -1

DOMAINS_DEPTH_MAX: Final = 64
"""Domains over domains over arrays: the catalogue cannot hold a circle, facts read while it changes could."""


class Kind(Enum):
    """How a value is written in JSON."""

    BOOL = "bool"
    """`t` and `f` become true and false."""
    NUMBER = "number"
    """An integer: its text is JSON."""
    FLOAT = "float"
    """A number, except NaN, Infinity and -Infinity, which are strings."""
    STRING = "string"
    """A string that may need escaping."""
    PLAIN = "plain"
    """A string that never needs escaping."""
    TIMESTAMP = "timestamp"
    """ISO 8601 without a zone; `infinity` and BC stay as PostgreSQL writes them."""
    TIMESTAMPTZ = "timestamptz"
    """ISO 8601 in UTC; `infinity` and BC stay as PostgreSQL writes them."""
    BYTEA = "bytea"
    """Hexadecimal text becomes base64."""
    ARRAY = "array"
    """A JSON array of the element's kind."""


class TypeFacts(NamedTuple):
    """What pg_type says of a type. `element_oid` is 0 unless values are written as arrays (typoutput is array_out)."""

    oid: int
    schema: str
    name: str
    type_kind: str
    base_oid: int = 0
    base_modifier: int = NO_MODIFIER
    element_oid: int = 0
    delimiter: str = ","


class TypeInfo(NamedTuple):
    """A type, resolved. `base_oid` and `base_modifier` are those below all domains; `element` is for arrays alone."""

    oid: int
    name: str
    kind: Kind
    base_oid: int
    base_name: str
    base_modifier: int = NO_MODIFIER
    element: TypeInfo | None = None
    delimiter: str = ","


class Types:
    """Resolves OIDs to kinds: built-in types by themselves, the others from facts once they are given."""

    def __init__(self, facts: Iterable[TypeFacts] = ()) -> None:
        self._facts: dict[int, TypeFacts] = {}
        self._resolved: dict[int, TypeInfo] = dict(_BUILT_IN)
        self.learn(facts)

    def learn(self, facts: Iterable[TypeFacts]) -> None:
        """Take facts about types that are not built in; the latest win, as a dropped type's OID may be used again."""
        learned = {fact.oid: fact for fact in facts if fact.oid not in _BUILT_IN}
        if learned:
            self._facts.update(learned)
            self._resolved = dict(_BUILT_IN)

    def unknown(self, oids: Iterable[int]) -> set[int]:
        """Return those of the OIDs, and of what they are made of, that no fact is known about yet."""
        missing: set[int] = set()
        pending = list(oids)
        seen: set[int] = set()
        while pending:
            oid = pending.pop()
            if oid in _BUILT_IN or oid in seen:
                continue
            seen.add(oid)
            fact = self._facts.get(oid)
            if fact is None:
                missing.add(oid)
            else:
                pending += [part for part in (fact.base_oid, fact.element_oid) if part]
        return missing

    def resolve(self, oid: int) -> TypeInfo:
        """Return what is known of the type; a type without facts is a STRING."""
        info = self._resolved.get(oid)
        if info is None:
            info = self._resolved[oid] = self._resolve(oid, DOMAINS_DEPTH_MAX)
        return info

    def _resolve(self, oid: int, depth: int) -> TypeInfo:
        if oid in _BUILT_IN:
            return _BUILT_IN[oid]
        fact = self._facts.get(oid)
        if fact is None or depth == 0:
            return TypeInfo(oid, f"type {oid}", Kind.STRING, oid, f"type {oid}")
        if fact.type_kind == "d":
            base = self._resolve(fact.base_oid, depth - 1)
            modifier = base.base_modifier if fact.base_modifier == NO_MODIFIER else fact.base_modifier
            return base._replace(oid=oid, name=fact.name, base_modifier=modifier)
        if fact.element_oid:
            element = self._resolve(fact.element_oid, depth - 1)
            return TypeInfo(oid, fact.name, Kind.ARRAY, oid, fact.name, element=element, delimiter=fact.delimiter)
        return TypeInfo(oid, fact.name, Kind.STRING, oid, fact.name)


# The built-in types, by kind: OID, name, OID of the array. OIDs below 10,000 never change between versions; a test
# compares this table with pg_type of every server at hand. Row types of the catalogue are left to the general rules.
_TABLE: Final = {
    Kind.BOOL: "16 bool 1000",
    Kind.NUMBER: "20 int8 1016 | 21 int2 1005 | 23 int4 1007 | 26 oid 1028",
    Kind.FLOAT: "700 float4 1021 | 701 float8 1022",
    Kind.TIMESTAMP: "1114 timestamp 1115",
    Kind.TIMESTAMPTZ: "1184 timestamptz 1185",
    Kind.BYTEA: "17 bytea 1001",
    Kind.PLAIN: """
        1700 numeric 1231 | 790 money 791 | 2950 uuid 2951
        1082 date 1182 | 1083 time 1183 | 1266 timetz 1270 | 1186 interval 1187
        869 inet 1041 | 650 cidr 651 | 829 macaddr 1040 | 774 macaddr8 775
        1560 bit 1561 | 1562 varbit 1563
        600 point 1017 | 601 lseg 1018 | 602 path 1019 | 603 box 1020 | 604 polygon 1027 | 628 line 629 | 718 circle 719
        3904 int4range 3905 | 3926 int8range 3927 | 3906 numrange 3907
        4451 int4multirange 6150 | 4536 int8multirange 6157 | 4532 nummultirange 6151
        27 tid 1010 | 28 xid 1011 | 29 cid 1012 | 5069 xid8 271 | 3220 pg_lsn 3221
        2970 txid_snapshot 2949 | 5038 pg_snapshot 5039 | 22 int2vector 1006 | 30 oidvector 1013
    """,
    Kind.STRING: """
        25 text 1009 | 1043 varchar 1015 | 1042 bpchar 1014 | 18 char 1002 | 19 name 1003
        114 json 199 | 3802 jsonb 3807 | 4072 jsonpath 4073 | 142 xml 143
        3614 tsvector 3643 | 3615 tsquery 3645 | 3642 gtsvector 3644
        3908 tsrange 3909 | 3910 tstzrange 3911 | 3912 daterange 3913
        4533 tsmultirange 6152 | 4534 tstzmultirange 6153 | 4535 datemultirange 6155
        24 regproc 1008 | 2202 regprocedure 2207 | 2203 regoper 2208 | 2204 regoperator 2209 | 2205 regclass 2210
        2206 regtype 2211 | 3734 regconfig 3735 | 3769 regdictionary 3770 | 4089 regnamespace 4090 | 4096 regrole 4097
        4191 regcollation 4192 | 1033 aclitem 1034 | 1790 refcursor 2201 | 2275 cstring 1263
        194 pg_node_tree 0 | 3361 pg_ndistinct 0 | 3402 pg_dependencies 0 | 5017 pg_mcv_list 0
        4600 pg_brin_bloom_summary 0 | 4601 pg_brin_minmax_multi_summary 0
    """,
}
_BOX_OID: Final = 603


def _built_in() -> dict[int, TypeInfo]:
    found: dict[int, TypeInfo] = {}
    for kind, text in _TABLE.items():
        for entry in text.strip().replace("\n", " | ").split("|"):
            if not (words := entry.split()):
                continue
            oid, name, array_oid = int(words[0]), words[1], int(words[2])
            found[oid] = TypeInfo(oid, name, kind, oid, name)
            if array_oid:
                # A box is written with commas in it, so it alone is separated by something else.
                delimiter = ";" if oid == _BOX_OID else ","
                found[array_oid] = TypeInfo(
                    array_oid, f"_{name}", Kind.ARRAY, array_oid, f"_{name}", element=found[oid], delimiter=delimiter
                )
    return found


_BUILT_IN: Final = _built_in()
