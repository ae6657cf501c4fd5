"""Chat templates that take all memory or time there is: name -> source."""

from __future__ import annotations

_MB = "{% set t = 'abcdefgh' * 131072 %}"
_LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}"
_ENDS = "{% endfor %}{% endfor %}"
_HUGE = "{% set n = messages | length * 900000000 %}"  # not folded when the template is compiled


def _grows(start: str, step: str) -> str:
    """A value that is made of itself again and again."""
    return f"{{% set s = namespace(v={start}) %}}{{% for i in range(64) %}}{{% set s.v = {step} %}}{{% endfor %}}"


# Methods and operators that make a long text of a short one.
_LONG = {
    "center": "{{ 'x'.center(n) }}",
    "ljust": "{{ 'x'.ljust(n) }}",
    "rjust": "{{ 'x'.rjust(n) }}",
    "zfill": "{{ '7'.zfill(n) }}",
    "expandtabs": "{{ '\\t'.expandtabs(n) }}",
    "repeat a text": "{{ 'x' * n }}",
    "repeat a list": "{{ ([0] * n) | length }}",
    "repeat a tuple": "{{ ((0,) * n) | length }}",
    "format width": "{{ '{:>900000000}'.format('x') }}",
    "format argument": "{{ '{:>{}}'.format('x', n) }}",
    "format filter": "{{ '%900000000s' | format('x') }}",
    "percent": "{{ '%*d' % (n, 1) }}",
    "percent precision": "{{ '%.*f' % (n, 1.5) }}",
    "center filter": "{{ 'x' | center(n) }}",
    "indent filter": "{{ ('x\\n' * 9000) | indent(n) }}",
    "tojson indent": "{{ [[[1]]] | tojson(indent=n) }}",
    "slice of a range": "{{ range(99999) | list | slice(n) | list | length }}",
    "batch fill": "{{ [1] | batch(n, 0) | list | length }}",
    "wordwrap": "{{ ('x ' * 4000000) | wordwrap(1, wrapstring='y' * 4000) }}",
    "lipsum": "{{ lipsum(n) }}",
    "lipsum words": "{{ lipsum(1, min=n, max=n + 1) }}",
    "truncate": "{{ ('x' * n) | truncate(3) }}",
    "bytes": "{{ 'x'.ljust(n).encode() | length }}",
    "list of a text": "{{ ('x' * 90000000) | list | length }}",
    "replace": "{{ t.replace('a', t) }}",
    "replace nothing": "{{ t.replace('', t) }}",
    "replace filter": "{{ t | replace('b', t) }}",
    "join": "{{ t | join(t) }}",
    "join method": "{{ t.join(t) }}",
    "translate": "{{ t.translate({97: t, 98: t}) }}",
    "urlize": "{{ ('http://a.b ' * 900000) | urlize(target=t[:9000]) }}",
    "split": "{{ (t * 60).split('a') | length }}",
    "groupby": "{{ (t * 40) | list | groupby(0) | list | length }}",
    "sort": "{{ (t * 80) | list | sort | length }}",
    "unique": "{{ range(99999) | map('string') | map('center', 90000) | unique | list | length }}",
    "map": "{{ range(99999) | map('string') | map('center', 90000) | list | length }}",
    "escape": "{{ ('<' * 90000000) | escape }}",
    "upper": "{{ ('\u0149' * 60000000).upper() }}",
    "pprint": "{{ (range(99999) | list * 9) | pprint * 900 }}",
    "tojson": "{{ ([[t] * 900] * 90) | tojson }}",
    "urlencode": "{{ ('\u20ac' * 40000000) | urlencode }}",
    "xmlattr": "{{ {'a': '<' * 90000000} | xmlattr }}",
    "striptags": "{{ ('<' * 200000) | striptags }}" + _LOOP + _ENDS,
    "dictsort": "{{ dict.fromkeys(range(99999), t * 90) | dictsort | tojson }}",
    "partition": "{{ (('a' * 30000000).partition('b') + ('a' * 60000000, 'c' * 90000000)) | join }}",
}
_DOUBLED = {
    "doubled by ~": ("'abcd'", "s.v ~ s.v"),
    "doubled by +": ("'abcd'", "s.v + s.v"),
    "doubled by join": ("'abcd'", "[s.v, s.v] | join"),
    "doubled by format": ("'abcd'", "'%s%s' % (s.v, s.v)"),
    "doubled list": ("[1, 2]", "s.v + s.v"),
    "doubled tuple": ("(1, 2)", "s.v + s.v"),
    "doubled by replace": ("'aa'", "s.v.replace('a', 'aa')"),
    "squared": ("3", "s.v * s.v"),
    "power": ("9", "s.v ** s.v"),
    "shared lists": ("[1]", "[s.v, s.v, s.v]"),
    "nested json": ("[1]", "[s.v, s.v] | tojson"),
    "dicts": ("{'a': 1}", "dict(a=s.v, b=s.v) | string"),
    "escaped": ("'&'", "(s.v | escape) ~ (s.v | escape)"),
}
_ENDLESS = {
    "loops": _LOOP + _ENDS,
    "loops that write": _LOOP + "x" * 900 + _ENDS,
    "loops of a list": "{% set x = [0] * 20000 %}{% for i in x %}{% for j in x %}" + _ENDS,
    "macro recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "macro without end": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "recursive loop": "{% for x in 'ab' recursive %}{% if loop.depth < 40 %}{{ loop('ab') }}{% endif %}{% endfor %}",
    "caller": "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call f() %}" * 40 + "x" + "{% endcall %}" * 40,
    "sum": "{% for i in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "map of maps": "{% for i in range(99999) %}{% set x = range(99999) | map('string') | list %}{% endfor %}",
    "long power": "{{ (messages | length + 8) ** 99999999 % 7 }}",
    "power of powers": "{% set a = 7 ** 99999 %}{{ (a ** 9999) % 3 }}",
    "shift by product": _grows("3", "s.v * s.v * s.v"),
    "count": "{% for i in range(9999) %}{{ (t * 20).count('b' * 3000) }}{% endfor %}",
    "find": "{% for i in range(9999) %}{{ ('a' * 900000).find('a' * 400000 ~ 'b') }}{% endfor %}",
    "cycler": "{% set c = cycler(*range(9)) %}" + _LOOP + "{% set x = c.next() %}" + _ENDS,
    "deep parentheses": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "deep lists": "{{ " + "[" * 9000 + "1" + "]" * 9000 + " }}",
    "deep ifs": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "deep not": "{{ " + "not " * 9000 + "1 }}",
    "long sum": "{{ " + "+".join(["1"] * 30000) + " }}",
    "many blocks": "{% if messages %}x{% endif %}" * 34000,
    "folded constant": "{{ 'a' * 100000000 }}",
    "folded power": "{{ 9 ** 99999999 }}",
}  # fmt: skip

BOMBS: dict[str, str] = {
    **{name: _HUGE + _MB + source for name, source in _LONG.items()},
    **{name: _grows(*rule) + "{{ s.v }}" for name, rule in _DOUBLED.items()},
    **{name: (_MB if " t" in source or "(t" in source else "") + source for name, source in _ENDLESS.items()},
}
