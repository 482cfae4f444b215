"""Tests of fedquilt.report."""
