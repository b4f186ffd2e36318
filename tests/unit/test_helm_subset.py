"""The renderer that stands in for Helm: the same text for what it knows, refusal of the rest.

The expected texts follow from the rules of Go's text/template and Helm's functions, by hand.
"""

import pytest

from tests.helm_subset import Chart, TemplateError


def chart(tmp_path, template: str, values: str = "a: 1") -> Chart:
    """A chart of one template."""
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "one.yaml").write_text(template)
    (tmp_path / "values.yaml").write_text(values)
    (tmp_path / "Chart.yaml").write_text("appVersion: 1")
    return Chart(tmp_path)


@pytest.mark.parametrize(
    "template, text",
    [
        ("x: {{ .Values.a }}\n", "x: 7\n"),
        ("x: {{ .Values.s | quote }}", 'x: "say \\"no\\""'),
        (
            "{{ .Values.a | sha256sum }}",
            "7902699be42c8a8e46fbbb4501726517e86b22c56a189f7625a6da49081b2451",
        ),
        ("x:\n  {{- toYaml .Values.m | nindent 2 }}\ny", "x:\n  b: true\n  c:\n  - 1\ny"),
        ("{{- if .Values.none }}\nx\n{{- else }}\ny\n{{- end }}\nz", "\ny\nz"),
        ("a {{ if not .Values.none -}}\n  b{{ end }}", "a b"),
        ("{{- if .Values.m }}{{- if .Values.none }}x{{ end }}y{{ end }}", "y"),
        (
            '{{- define "d" -}}\np: {{ .Values.a }}\nq\n{{- end }}'
            'r:{{ include "d" . | nindent 1 }}',
            "r:\n p: 7\n q",
        ),
        ("a {{- /* not {{ .Values.b */ -}} b", "ab"),
    ],
)
def test_the_renderer_does_as_helm_does(tmp_path, template, text):
    made = chart(tmp_path, template, '{a: 7, s: say "no", m: {c: [1], b: true}, none: []}')
    assert made.text() == {"one.yaml": text}


@pytest.mark.parametrize(
    "template, values",
    [
        ("{{ range .Values.a }}{{ end }}", "a: [1]"),
        ("{{ .Values.a | default 3 }}", "a: 1"),
        ("{{ printf .Values.a }}", "a: x"),
        ("{{ if and .Values.a .Values.a }}{{ end }}", "a: 1"),
        ("{{ .Values.b }}", "a: 1"),
        ("{{ .Values.a }}", "a: 1000000"),
        ("{{ .Values.a }}", "a: {b: 1}"),
        ("{{ if .Values.a }}", "a: 1"),
        ("{{ end }}", "a: 1"),
        ("{{-.Values.a }}", "a: 1"),
        ("{{/* no end }}", "a: 1"),
        ('{{ include "absent" . }}', "a: 1"),
    ],
)
def test_the_renderer_refuses_everything_else(tmp_path, template, values):
    with pytest.raises(TemplateError):
        chart(tmp_path, template, values).text()
